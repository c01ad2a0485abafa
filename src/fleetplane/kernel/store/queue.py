"""The writer's queue of submitted transactions: in order while short, fair between tenants when long.

Submissions are queued per tenant. As long as everything fits into one group nobody is preferred. Beyond
that each tenant has its turn, one transaction each, so that a tenant that submits a thousand waits for
them alone. Within a tenant, and among transactions that touch the same resource, the order of arrival
is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store.draft import Committed, Draft
from fleetplane.kernel.store.engine import ArchiveCut
from fleetplane.kernel.store.group import TransactionResult

TENANT_SEGMENTS = 2
"""Of a scope: `org/acme/ws/web` belongs to `org/acme`."""


class Queued(Protocol):
    """A transaction on its way."""

    @property
    def share(self) -> str: ...

    @property
    def number(self) -> int:
        """In the order of arrival."""

    @property
    def behind(self) -> Sequence[Queued]:
        """Queued entries of other tenants that must be taken first."""

    taken: bool


Q = TypeVar("Q", bound=Queued)


def share_of(touches: Collection[Key]) -> str:
    """The tenant whose turn a transaction takes: of the scopes that it touches, the first by name."""
    if len(touches) == 1:
        (key,) = touches
        return _tenant(key.scope)
    return min((_tenant(key.scope) for key in touches), default="")


@lru_cache(maxsize=4096)
def _tenant(scope: str) -> str:
    return "/".join(scope.split("/", TENANT_SEGMENTS)[:TENANT_SEGMENTS])


class FairQueue(Generic[Q]):
    def __init__(self) -> None:
        self._shares: dict[str, deque[Q]] = {}
        """In the order of their turns."""
        self._length = 0

    def __repr__(self) -> str:
        return f"<FairQueue length={self._length} shares={len(self._shares)}>"

    def __len__(self) -> int:
        return self._length

    def has_room(self, share: str, limit: int) -> bool:
        """Whether one more may wait; a tenant that uses less than its share always may."""
        if self._length < limit:
            return True
        waiting = self._shares.get(share)
        sharing = len(self._shares) + (waiting is None)
        return (0 if waiting is None else len(waiting)) < limit // max(2, sharing)

    def push(self, one: Q) -> None:
        waiting = self._shares.get(one.share)
        if waiting is None:
            self._shares[one.share] = waiting = deque()
        waiting.append(one)
        self._length += 1

    def take(self, limit: int) -> list[Q]:
        """The next ones, at most so many, in order of arrival."""
        if len(self._shares) == 1:
            (waiting,) = self._shares.values()
            found = [waiting.popleft() for _ in range(min(limit, len(waiting)))]
            for one in found:
                one.taken = True
        else:
            found = self._by_turns(limit)
            found.sort(key=_number)
        self._length -= len(found)
        for share in [share for share, waiting in self._shares.items() if not waiting]:
            del self._shares[share]
        return found

    def _by_turns(self, limit: int) -> list[Q]:
        found: list[Q] = []
        progress = True
        while progress and len(found) < limit:
            progress = False
            for share, waiting in list(self._shares.items()):
                if len(found) == limit:
                    break
                if waiting and all(other.taken for other in waiting[0].behind):
                    one = waiting.popleft()
                    one.taken = True
                    found.append(one)
                    progress = True
                    # Whoever had a turn is the last to have the next, also in the next group.
                    self._shares[share] = self._shares.pop(share)
        return found

    def clear(self) -> list[Q]:
        left = sorted((one for waiting in self._shares.values() for one in waiting), key=_number)
        self._shares.clear()
        self._length = 0
        return left


def _number(one: Queued) -> int:
    return one.number


class Settlement:
    """One reader's wait for some transactions."""

    __slots__ = ("_future", "_left")

    def __init__(self, future: asyncio.Future[None], left: int) -> None:
        self._future = future
        self._left = left

    def note(self) -> None:
        self._left -= 1
        if self._left == 0 and not self._future.done():
            self._future.set_result(None)


class Submission:
    """One transaction on its way through the writer."""

    __slots__ = (
        "action",
        "actor",
        "answer",
        "behind",
        "change",
        "cut",
        "horizon",
        "number",
        "share",
        "taken",
        "touches",
        "waiters",
    )

    def __init__(
        self,
        change: Callable[[Draft], object],
        actor: str,
        action: str,
        touches: frozenset[Key],
        horizon: int,
        cut: ArchiveCut | None,
        number: int,
    ) -> None:
        self.number = number
        self.share = share_of(touches)
        self.behind: Sequence[Submission] = ()
        """Of other shares, and touching the same."""
        self.taken = False
        self.change = change
        self.actor = actor
        self.action = action
        self.touches = touches
        self.cut = cut
        """Where the audit chain should begin, for an archive."""
        self.horizon = horizon
        """Where the log should begin, for a compaction; else 0."""
        self.answer: asyncio.Future[Committed[object]] = asyncio.get_running_loop().create_future()
        self.waiters: list[Settlement] = []
        """Readers who want to see what becomes of it. One future each: cancelling one must not cancel all."""


def settled(
    answer: asyncio.Future[Committed[object]], result: TransactionResult | None, error: FleetplaneError | None
) -> None:
    """Tell a caller what came of its transaction."""
    if error is not None and (result is None or result.depends):
        # A copy each: an exception that several callers raise would collect all their tracebacks.
        answer.set_exception(
            type(error)(
                error.message,
                hint=error.advice,
                retry_after_seconds=error.retry_after_seconds,
                details=error.details,
            )
        )
    elif result is None:
        answer.cancel()
    elif isinstance(result.error, StopIteration):  # a future cannot carry one
        answer.set_exception(RuntimeError("the change raised StopIteration"))
    elif result.error is not None:
        answer.set_exception(result.error)
    else:
        answer.set_result(Committed(value=result.value, revision=result.revision))
