"""The memory view: every live resource, as of the last durable transaction.

All reads come from here. Lists are kept until something of that kind changes, so that reading
the same list again costs a dictionary lookup. Whoever decides something from an index of its own has it
fed here, in the same step: it is never behind what can be read.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from fleetplane.kernel.access import EVERYWHERE
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.resources import AnyResource, Key
from fleetplane.kernel.sealing import Sealer
from fleetplane.kernel.store.engine import (
    Claim,
)

LISTS_PER_KIND_LIMIT = 64
"""Scopes whose list is kept per kind; tuples of pointers, 8 bytes a resource."""


class Index(Protocol):
    """Is told of every change of a kind as memory shows it, by whichever server it was made."""

    def moved(self, before: AnyResource | None, after: AnyResource | None) -> None:
        """None where there was, or is, no such resource. Must not block or raise."""
        ...


class KindView:
    """The live resources of one kind, by (scope, name)."""

    __slots__ = ("_indexes", "_lists", "_order", "live", "revision")

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        """Of the last change to this kind."""
        self.live: dict[tuple[str, str], AnyResource] = {}
        self._order: list[tuple[str, str]] = []
        self._lists: dict[str, tuple[AnyResource, ...]] = {}
        self._indexes: list[weakref.ref[Index]] = []

    def feed(self, index: Index) -> None:
        """Tell it what there is, and from now on what changes, for as long as somebody else holds it."""
        for resource in self.live.values():
            index.moved(None, resource)
        self._indexes = [*(one for one in self._indexes if one() is not None), weakref.ref(index)]

    def _tell(self, before: AnyResource | None, after: AnyResource | None) -> None:
        for reference in self._indexes:
            if (index := reference()) is not None:
                index.moved(before, after)

    def load(self, resources: Iterable[AnyResource]) -> None:
        self.live.update(((resource.scope, resource.name), resource) for resource in resources)
        self._order = sorted(self.live)

    def list(self, scope: str) -> Sequence[AnyResource]:
        found = self._lists.get(scope)
        if found is None:
            live = self.live
            found = tuple([live[at] for at in self._below(scope)])
            if len(self._lists) < LISTS_PER_KIND_LIMIT:
                self._lists[scope] = found
        return found

    def _below(self, scope: str) -> Sequence[tuple[str, str]]:
        """Where the resources at or below a scope lie, in order, without looking at any other."""
        order = self._order
        if scope == EVERYWHERE:
            return order
        at: list[tuple[str, str]] = []
        for begin, end in _stretches(scope):
            at += order[bisect_left(order, (begin, "")) : bisect_left(order, (end, ""))]
        return at

    def count(self, scope: str) -> int:
        """How many there are at or below a scope, without looking at any of them."""
        order = self._order
        if scope == EVERYWHERE:
            return len(order)
        return sum(
            bisect_left(order, (end, "")) - bisect_left(order, (begin, ""))
            for begin, end in _stretches(scope)
        )

    def put(self, resource: AnyResource) -> None:
        at = (resource.scope, resource.name)
        before = self.live.get(at)
        if before is None:
            insort(self._order, at)
        self.live[at] = resource
        self._lists.clear()
        if self._indexes:
            self._tell(before, resource)

    def delete(self, scope: str, name: str) -> None:
        at = (scope, name)
        if (before := self.live.pop(at, None)) is not None:
            del self._order[bisect_left(self._order, at)]
            self._lists.clear()
            if self._indexes:
                self._tell(before, None)


def _stretches(scope: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """From where to where, in order, a scope and everything below it lie.

    Two stretches, because `org/a-b` comes between `org/a` and `org/a/x`: "-" is before "/".
    Nothing lies between a text and the same text with NUL, nor after "/" and before "0".
    """
    return (scope, scope + "\0"), (scope + "/", scope + "0")


class StoreView:
    """The live resources of every kind that this process knows."""

    def __init__(
        self,
        kinds: Iterable[str],
        revisions: dict[str, int],
        unlogged: Collection[str] = (),
        first_revision: int = 0,
        sealers: Mapping[str, Sealer] | None = None,
    ) -> None:
        # Also of a kind of which there never was any: a list of nothing is of this lineage, too.
        self._kinds = {kind: KindView(revisions.get(kind, first_revision)) for kind in kinds}
        self.unlogged = frozenset(unlogged)
        """Kinds of which the log has no content."""
        self.sealers = sealers or {}
        """Of each kind that is stored sealed once the level allows it."""
        self.claims: dict[Claim, str] = {}
        """Who holds each unique value."""

    def of(self, kind: str) -> KindView:
        try:
            return self._kinds[kind]
        except KeyError:
            raise FleetplaneError(f"{kind} is not among the kinds that the store was opened with") from None

    def get(self, key: Key) -> AnyResource | None:
        kind, scope, name = key
        return self.of(kind).live.get((scope, name))

    def changed_since(self, kind: str, scope: str, revision: int) -> Iterator[AnyResource]:
        return (resource for resource in self.of(kind).list(scope) if resource.revision > revision)

    def __len__(self) -> int:
        return sum(len(kind.live) for kind in self._kinds.values())
