"""The one writer: a queue of transactions, made durable in groups.

While one group is being synced to disk, those that arrive are gathered into the next. Memory
and the callers learn of a group only once the database has it. Decides the order of writes
and who is told what about their fate; does not know SQL, nor what a change means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, ResourceExhausted, Unavailable
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store.draft import Committed, Draft
from fleetplane.kernel.store.engine import Engine, Mark
from fleetplane.kernel.store.group import Group, Result
from fleetplane.kernel.store.settings import StoreSettings
from fleetplane.kernel.store.view import View
from fleetplane.kernel.watch import Hub

RECONCILE_ATTEMPTS = 3
"""Times the database is asked what became of a commit that failed, before its callers are told "unknown"."""
TRIM_LIMIT = 4
"""A commit trims at most this many times the history's slack, so that no single one is slow."""


class Submission:
    """One transaction on its way through the writer."""

    __slots__ = ("action", "actor", "answer", "change", "horizon", "touches", "waiters")

    def __init__(
        self,
        change: Callable[[Draft], object],
        actor: str,
        action: str,
        touches: frozenset[Key],
        horizon: int,
    ) -> None:
        self.change = change
        self.actor = actor
        self.action = action
        self.touches = touches
        self.horizon = horizon
        """Where the log should begin, for a compaction; else 0."""
        self.answer: asyncio.Future[Committed[object]] = asyncio.get_running_loop().create_future()
        self.waiters: list[asyncio.Future[None]] = []
        """Readers who want to see what becomes of it. One future each: cancelling one must not cancel all."""


class Writer:
    def __init__(
        self, engine: Engine, view: View, hub: Hub, mark: Mark, settings: StoreSettings, clock: Clock
    ) -> None:
        self._engine = engine
        self._view = view
        self._hub = hub
        self._mark = mark
        self._settings = settings
        self._clock = clock
        self._queue: deque[Submission] = deque()
        self._idle: asyncio.Future[None] | None = None
        self._closing = False
        self._doubt: Group | None = None
        """A group whose commit failed and whose fate could not be learnt yet."""
        self._last_for_key: dict[Key, Submission] = {}
        self._last_for_kind: dict[str, Submission] = {}
        self.commits = 0
        self.transactions = 0
        self.largest_group = 0
        self.failed_commits = 0
        self.queue_refusals = 0
        self.writable = True

    def __repr__(self) -> str:
        return f"<Writer revision={self._mark.revision} queued={len(self._queue)} commits={self.commits}>"

    @property
    def mark(self) -> Mark:
        return self._mark

    @property
    def queued(self) -> int:
        return len(self._queue)

    # The callers' side.

    def submit(
        self,
        change: Callable[[Draft], object],
        *,
        actor: str,
        action: str,
        touches: frozenset[Key],
        horizon: int = 0,
    ) -> asyncio.Future[Committed[object]]:
        """Accept a transaction. Cancelling the future withdraws it, unless it is being written already."""
        if self._closing:
            raise Unavailable("the store is closed")
        if len(self._queue) >= self._settings.queue_limit:
            self.queue_refusals += 1
            raise ResourceExhausted(
                f"{len(self._queue)} transactions are waiting to be written, the most there may be",
                retry_after_seconds=1.0,
            )
        submission = Submission(change, actor, action, touches, horizon)
        self._queue.append(submission)
        for key in touches:
            self._last_for_key[key] = submission
            self._last_for_kind[key.kind] = submission
        self._wake()
        return submission.answer

    def last_for(self, what: Key | str) -> Submission | None:
        """The last accepted, still unsettled transaction that touches a key, or a kind (a string)."""
        if isinstance(what, str):
            return self._last_for_kind.get(what)
        return self._last_for_key.get(what)

    @property
    def unsettled_kinds(self) -> Collection[str]:
        """The kinds of which anything is accepted and not yet settled; always the same object."""
        return self._last_for_kind.keys()

    def settlement(self, submission: Submission) -> asyncio.Future[None]:
        """Done once the transaction, and so every earlier one, is applied or has failed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        submission.waiters.append(waiter)
        return waiter

    def close(self) -> None:
        """Accept no more; `run` returns once the queue is empty."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    # The writer's side.

    async def run(self) -> None:
        group: list[Submission] = []
        try:
            while self._queue or not self._closing:
                if not self._queue:
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle
                    continue
                size = min(len(self._queue), self._settings.group_limit)
                group = [self._queue.popleft() for _ in range(size)]
                await self._write(group)
                group = []
        finally:
            # Reached with work left only by cancellation or a defect: nobody may be left waiting.
            self._closing = True
            left = [*group, *self._queue]
            self._queue.clear()
            self._settle(left, [None] * len(left), Unavailable("the store's writer has stopped"))

    async def _write(self, submissions: Sequence[Submission]) -> None:
        error = await self._resolve_doubt()
        if error is not None:
            self._settle(submissions, [None] * len(submissions), error)
            return
        group = Group(self._view, self._mark, self._clock)
        results = [self._run(group, submission) for submission in submissions]
        self._trim(group)
        if group.changed:
            error = await self._commit(group)
        if error is None:
            self._apply(group)
        self._settle(submissions, results, error)

    def _run(self, group: Group, submission: Submission) -> Result | None:
        if submission.answer.done():  # its caller has gone away before it began
            return None
        if submission.horizon:
            group.compact(submission.horizon)
        return group.run(
            submission.change, actor=submission.actor, action=submission.action, touches=submission.touches
        )

    def _trim(self, group: Group) -> None:
        """Keep the log near its length: some transactions pay for the deletion of as many old ones."""
        keep, slack = self._settings.history_revisions, self._settings.history_slack_revisions
        if group.revision - self._mark.compacted > keep + slack:
            group.compact(min(group.revision - keep, self._mark.compacted + TRIM_LIMIT * slack))

    async def _commit(self, group: Group) -> FleetplaneError | None:
        """Make a group durable; the error if it is not, having made sure that it is not."""
        try:
            await self._engine.commit(group.rows())
        except FleetplaneError as error:
            self.failed_commits += 1
            for _ in range(RECONCILE_ATTEMPTS):
                committed = await self._committed(group)
                if committed is not None:
                    self.writable = committed
                    return None if committed else error
            self._doubt = group
            self.writable = False
            return Unavailable(
                "the database does not say whether this was written", hint="read before retrying"
            )
        self.writable = True
        return None

    async def _committed(self, group: Group) -> bool | None:
        """Whether the database has the group; None if it cannot be asked."""
        try:
            mark = await self._engine.mark()
        except FleetplaneError:
            return None
        if mark == group.after():
            return True
        if mark == self._mark:
            return False
        raise IntegrityError(f"the database is at revision {mark.revision}: someone else has written to it")

    async def _resolve_doubt(self) -> FleetplaneError | None:
        if self._doubt is None:
            return None
        committed = await self._committed(self._doubt)
        if committed is None:
            return Unavailable("the database cannot be read")
        group, self._doubt = self._doubt, None
        if committed:
            self._apply(group)
        return None

    def _apply(self, group: Group) -> None:
        if not group.changed:
            return
        self._mark = group.after()
        self.commits += 1
        self.transactions += group.transactions
        self.largest_group = max(self.largest_group, group.transactions)
        group.apply()
        self._hub.compacted = self._mark.compacted
        self._hub.publish(group.events, self._mark.revision)

    def _settle(
        self,
        submissions: Sequence[Submission],
        results: Sequence[Result | None],
        error: FleetplaneError | None,
    ) -> None:
        for submission, result in zip(submissions, results, strict=True):
            for key in submission.touches:
                if self._last_for_key.get(key) is submission:
                    del self._last_for_key[key]
                if self._last_for_kind.get(key.kind) is submission:
                    del self._last_for_kind[key.kind]
            if not submission.answer.done():
                _answer(submission.answer, result, error)
            for waiter in submission.waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _answer(
    answer: asyncio.Future[Committed[object]], result: Result | None, error: FleetplaneError | None
) -> None:
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
