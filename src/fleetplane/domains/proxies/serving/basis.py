"""What a decision about a workspace was based on, and whether that still holds when it is written.

A decision may look at hundreds of hosts and take a while, so it is made outside the transaction. Within this
process the workspace's lock keeps everything as it was; another server, or an object that was declared
meanwhile, knows nothing of the lock. So the transaction compares what is there with what the decision saw,
and the decision is made again if it was anything else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Final, ParamSpec, Protocol, TypeVar

from fleetplane.domains.proxies.kinds.records import (
    ACCESS_LIST,
    AGENT,
    CERTIFICATE,
    CONFIG_VERSION,
    SETTINGS,
    STREAM,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
)
from fleetplane.kernel.errors import Conflict, NotFound
from fleetplane.kernel.resources import AnyKind, AnyResource, Kind, Resource, SpecT, StatusT

P = ParamSpec("P")
R = TypeVar("R")

ATTEMPTS: Final = 20
"""Each of them was overtaken by somebody whose change was written: work is done all the same."""
DECIDING: Final[tuple[AnyKind, ...]] = (
    VIRTUAL_HOST,
    UPSTREAM,
    ACCESS_LIST,
    STREAM,
    SETTINGS,
    CERTIFICATE,
    AGENT,
    CONFIG_VERSION,
)
"""What decisions about a workspace look at."""


class ServedReader(Protocol):
    """The store, or a draft of it."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]: ...

    def count(self, kind: AnyKind, scope: str = "") -> int: ...


class WorkspaceMoved(Conflict):
    """The workspace is not what the decision saw; nothing was written."""

    reason = "WORKSPACE_MOVED"


@dataclass(frozen=True, slots=True)
class Basis:
    """A workspace as a decision saw it."""

    scope: str
    seen: Sequence[Sequence[AnyResource]]
    """Of each deciding kind; the store gives the same list until something in it changes."""

    @classmethod
    def of(cls, at: ServedReader, scope: str) -> Basis:
        return cls(scope, [at.list(kind, scope) for kind in DECIDING])

    def require(self, at: ServedReader) -> None:
        """Raise `WorkspaceMoved` unless everything is as it was, and `NotFound` without the workspace."""
        if at.get(WORKSPACE, self.scope, self.scope.rpartition("/")[2]) is None:
            raise NotFound("workspace not found")
        for kind, before in zip(DECIDING, self.seen, strict=True):
            now = at.list(kind, self.scope)
            if now is not before and [_mark(one) for one in now] != [_mark(one) for one in before]:
                raise WorkspaceMoved("the workspace was changed meanwhile", hint="try again")


def _mark(one: AnyResource) -> object:
    """What of an object decisions depend on."""
    if one.kind == CERTIFICATE.name:
        return one.uid, one.revision
    if one.kind == AGENT.name and one.status is not None:
        return one.uid, one.generation, one.status.capabilities
    return one.uid, one.generation


def decided_again(method: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Run a method that decides about a workspace once more if the workspace moved before it was written."""

    @wraps(method)
    async def deciding(*args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(ATTEMPTS - 1):
            try:
                return await method(*args, **kwargs)
            except WorkspaceMoved:
                continue
        return await method(*args, **kwargs)

    return deciding
