"""Transactions on their way through the writer, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store.draft import Committed, Draft
from fleetplane.kernel.store.engine import ArchiveCut
from fleetplane.kernel.store.group import TransactionResult
from fleetplane.kernel.store.queue.fair import share_of


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
