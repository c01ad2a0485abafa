"""The one writer: a queue of transactions, made durable in groups.

While one group is being synced to disk, those that arrive are gathered into the next. Memory
and the callers learn of a group only once the database has it. Where several servers write, a group is
run on what this one knows and kept only if nobody was faster; else it is run again on what was written
meanwhile, and so is one that changes nothing: a refusal is an answer, too. Decides the order of writes
and who is told what about their fate; does not know SQL, nor what a change means.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FleetplaneError,
    IntegrityError,
    OutcomeUnknown,
    ResourceExhausted,
    Unavailable,
)
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store.draft import Committed, Draft
from fleetplane.kernel.store.engine import (
    ALONE,
    ArchiveCut,
    DatabaseMark,
    Engine,
    GroupAuthor,
    GroupOutcome,
    Superseded,
    WriteGroup,
)
from fleetplane.kernel.store.group import Applier, GroupState, TransactionResult
from fleetplane.kernel.store.queue import FairQueue, Settlement, Submission, settled
from fleetplane.kernel.store.settings import StoreSettings
from fleetplane.kernel.store.view import StoreView

if TYPE_CHECKING:
    from fleetplane.kernel.store.servers.follower import Follower

log = structlog.get_logger(__name__)

RECONCILE_ATTEMPTS = 3
"""Times the database is asked what became of a commit that failed, before its callers are told "unknown"."""

GATHER_TURNS = 6
"""Of the event loop before a group is drafted, some 10 microseconds each when there is nothing to do."""

LOSSES_BEFORE_LOCK = 2
"""Times that other servers may be faster before a group is written while they wait."""
LOCK_PAUSE_SECONDS = 0.25
"""Between two such groups of one server: the others wait for its round trips meanwhile."""
LOCK_PAUSE_TIMES = 10
"""How many times as long as such a group took, at least: a server whose answers come late, and which so
keeps the others waiting for longer, costs them a tenth of their time, too."""
LOSSES_BEFORE_WAITING = 20
"""After which a server waits until that pause is over, and loses no more."""
ATTEMPTS_LIMIT = 100
"""To write one group; with the pause above, several seconds of losing to others."""

TRIM_ROWS = 5000
"""Of the log, deleted at a time behind the horizon, so that no commit waits long for it."""


class Overtaken(Exception):
    """Another server has written meanwhile; nothing of this one was."""


@dataclass(slots=True)
class GroupAttempt:
    """Transactions run together, what each answers, and why that does not count."""

    group: GroupState
    results: list[TransactionResult | None]
    error: FleetplaneError | None = None


_NONE: dict[str, Submission] = {}


class StoreWriter:
    def __init__(
        self,
        engine: Engine,
        view: StoreView,
        applier: Applier,
        settings: StoreSettings,
        clock: Clock,
        audit_key: bytes = b"",
    ) -> None:
        self._engine = engine
        self._view = view
        self._applier = applier
        self._settings = settings
        self.clock = clock
        self._audit_key = audit_key
        self.author: GroupAuthor | None = None
        """The author of the groups that this process writes; None as long as it must not."""
        self.follower: Follower | None = None
        """What reads the groups of other servers; None where there are none."""
        self._lock_due = -math.inf
        self._queue: FairQueue[Submission] = FairQueue()
        self._number = 0
        self._idle: asyncio.Future[None] | None = None
        self._moved = asyncio.Event()
        """The horizon, since the log was trimmed."""
        self._closing = False
        self._committing = False
        self._doubt: GroupState | None = None
        """A group whose commit failed and whose fate could not be learnt yet."""
        self._last_for_key: dict[Key, Submission] = {}
        self._last_for_kind: dict[str, dict[str, Submission]] = {}
        """Of each share: those of one are written in their order, those of two in any."""
        self.commits = 0
        self.transactions = 0
        self.largest_group = 0
        self.failed_commits = 0
        self.queue_refusals = 0
        self.losses = 0
        """Attempts that another server was faster than."""
        self.locked = 0
        """Attempts for which the others had to wait."""
        self.writable = True

    def __repr__(self) -> str:
        return f"<Writer revision={self.mark.revision} queued={len(self._queue)} commits={self.commits}>"

    @property
    def mark(self) -> DatabaseMark:
        return self._applier.mark

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
        cut: ArchiveCut | None = None,
    ) -> asyncio.Future[Committed[object]]:
        """Accept a transaction. Cancelling the future withdraws it, unless it is being written already."""
        if self._closing:
            raise Unavailable("the store is closed")
        if self.author is None:
            raise Unavailable("this server does not write yet", hint="call another one")
        self._number += 1
        submission = Submission(change, actor, action, touches, horizon, cut, self._number)
        share = submission.share
        if not self._queue.has_room(share, self._settings.queue_limit):
            self.queue_refusals += 1
            raise ResourceExhausted(
                f"{len(self._queue)} transactions are waiting to be written, the most there may be",
                retry_after_seconds=1.0,
            )
        for key in touches:
            before = self._last_for_key.get(key)
            if before is not None and before.share != share:
                submission.behind = (*submission.behind, before)
            self._last_for_key[key] = submission
            self._last_for_kind.setdefault(key.kind, {})[share] = submission
        self._queue.push(submission)
        self._wake()
        return submission.answer

    def last_for(self, what: Key | str) -> Collection[Submission]:
        """The last accepted, still unsettled transactions that touch a key, or a kind (a string)."""
        if isinstance(what, str):
            return self._last_for_kind.get(what, _NONE).values()
        last = self._last_for_key.get(what)
        return () if last is None else (last,)

    @property
    def unsettled_kinds(self) -> Collection[str]:
        """The kinds of which anything is accepted and not yet settled; always the same object."""
        return self._last_for_kind.keys()

    def settlement(self, submissions: Collection[Submission]) -> asyncio.Future[None]:
        """Done once these, and so every earlier one of their shares, are applied or have failed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settlement = Settlement(waiter, len(submissions))
        for submission in submissions:
            submission.waiters.append(settlement)
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
                await self._gather()
                group = self._queue.take(self._settings.group_limit)
                while group:  # more than once only if they are large
                    written = await self._write(group)
                    group = group[written:]
        finally:
            # Reached with work left only by cancellation or a defect: nobody may be left waiting.
            self._closing = True
            if self._committing:
                unknown = OutcomeUnknown("the store's writer has stopped while this was being written")
                self._settle(group, [None] * len(group), unknown)
                group = []
            left = [*group, *self._queue.clear()]
            self._settle(left, [None] * len(left), Unavailable("the store's writer has stopped"))

    async def _gather(self) -> None:
        """Let the answers of the last group out before the next is drafted, and in what comes meanwhile.

        Without it groups become smaller the faster they are written, and a busy server slower.
        """
        for _ in range(GATHER_TURNS):
            if len(self._queue) >= self._settings.group_limit:
                return
            await asyncio.sleep(0)

    async def _write(self, submissions: Sequence[Submission]) -> int:
        """Write these, or as many of them as fit into a group; returns how many are settled."""
        error = await self._resolve_doubt()
        if error is not None:
            self._settle(submissions, [None] * len(submissions), error)
            return len(submissions)
        attempt = await self._won(submissions)
        if attempt.error is None:
            self._apply(attempt.group)
        self._committing = False
        self._settle(submissions[: len(attempt.results)], attempt.results, attempt.error)
        error = attempt.error
        if isinstance(error, OutcomeUnknown) and self._doubt is None:
            raise OutcomeUnknown(
                f"{error.message}: it is unknown whether the last writes are kept, so the server stops",
                hint="look at the disk and its log, then start again; what is there then is what was kept",
            )
        return len(attempt.results)

    async def _won(self, submissions: Sequence[Submission]) -> GroupAttempt:
        """Run them on what is durable and make that durable, again whenever another server was faster."""
        for losses in range(ATTEMPTS_LIMIT):
            self._committing = False
            try:
                if losses >= LOSSES_BEFORE_WAITING:
                    await self.clock.sleep(max(0.0, self._lock_due - self.clock.monotonic()))
                if losses >= LOSSES_BEFORE_LOCK and self._may_lock():
                    return await self._attempt_alone(submissions)
                return await self._attempt(self._draft(submissions))
            except Overtaken:
                self.losses += 1
            try:
                await self._catch_up()
            except Unavailable as error:
                return self._failed(submissions, error)
        return self._failed(
            submissions, Unavailable("other servers write so much that this could not be written")
        )

    def _draft(self, submissions: Sequence[Submission]) -> GroupAttempt:
        """Run as many as fit into a group, on what memory shows; nothing remains of it outside."""
        group = GroupState(self._view, self.mark, self.clock, self._audit_key, self.author or ALONE)
        results: list[TransactionResult | None] = []
        for submission in submissions:
            results.append(self._run(group, submission))
            if group.is_full:
                break
        if self.follower is None or group.author.term:  # one of several sees to the horizon
            self._move_horizon(group)
        return GroupAttempt(group, results)

    async def _attempt(self, attempt: GroupAttempt) -> GroupAttempt:
        """Commit a group, or see that what its transactions were refused for is still so."""
        group = attempt.group
        if group.changed:
            self._committing = True
            attempt.error = await self._commit(group, self._engine.commit(group.rows()))
        elif self.follower is not None:
            try:
                head = await self._engine.mark()
            except FleetplaneError as error:
                attempt.error = error
            else:
                if head.number != group.before.number:
                    raise Overtaken
        return attempt

    def _may_lock(self) -> bool:
        return self.follower is not None and self.clock.monotonic() >= self._lock_due

    async def _attempt_alone(self, submissions: Sequence[Submission]) -> GroupAttempt:
        """Catch up and commit while no other server can write: who is slow comes to its turn, too."""
        assert self.follower is not None
        made: GroupAttempt | None = None

        def draft() -> WriteGroup | None:
            nonlocal made
            made = self._draft(submissions)
            self._committing = made.group.changed
            return made.group.rows() if made.group.changed else None

        self.locked += 1
        begun = self.clock.monotonic()
        try:
            outcome = await self.follower.write_alone(draft)
        except FleetplaneError as error:
            if made is None or not made.group.changed:
                if isinstance(error, Unavailable):
                    return self._failed(submissions, error)
                raise
            made.error = await self._in_doubt(made.group, error)
            return made
        finally:
            took = self.clock.monotonic() - begun
            pause = max(LOCK_PAUSE_SECONDS, LOCK_PAUSE_TIMES * took)
            self._lock_due = self.clock.monotonic() + pause
        if made is None:  # more is missing than is read under the lock
            raise Overtaken
        if outcome is not None:
            made.error = self._judged(made.group, outcome)
        return made

    def _failed(self, submissions: Sequence[Submission], error: FleetplaneError) -> GroupAttempt:
        """Nothing of them was written."""
        group = GroupState(self._view, self.mark, self.clock, self._audit_key)
        return GroupAttempt(group, [None] * len(submissions), error)

    def _run(self, group: GroupState, submission: Submission) -> TransactionResult | None:
        if submission.answer.done():  # its caller has gone away before it began
            return None
        if submission.horizon:
            group.compact(submission.horizon)
        result = group.run(
            submission.change, actor=submission.actor, action=submission.action, touches=submission.touches
        )
        if submission.cut is not None and result.error is None:
            group.cut(submission.cut)
        return result

    def _move_horizon(self, group: GroupState) -> None:
        """Keep the log near its length; what lies behind its horizon is deleted by `trim`."""
        keep, slack = self._settings.history_revisions, self._settings.history_slack_revisions
        if group.revision - self.mark.compacted > keep + slack:
            group.compact(group.revision - keep)

    async def trim(self) -> None:
        """Delete what lies behind the horizon, whenever it has moved; until cancelled."""
        while True:
            self._moved.clear()
            try:
                while await self._engine.trim(TRIM_ROWS) >= TRIM_ROWS:
                    pass  # commits come in between
            except FleetplaneError as error:  # what is left goes with the next
                log.warning("store.log_not_trimmed", error=str(error))
            await self._moved.wait()

    async def _commit(
        self, group: GroupState, committing: Coroutine[object, object, GroupOutcome]
    ) -> FleetplaneError | None:
        """Make a group durable; the error if it is not, having made sure that it is not."""
        try:
            outcome = await committing
        except OutcomeUnknown as error:
            self.failed_commits += 1
            self.writable = False
            return error
        except FleetplaneError as error:
            return await self._in_doubt(group, error)
        return self._judged(group, outcome)

    def _judged(self, group: GroupState, outcome: GroupOutcome) -> FleetplaneError | None:
        if outcome.written:
            self.writable = True
            return None
        if self.follower is None:
            raise IntegrityError(
                f"the database is at group {outcome.mark.number}, revision {outcome.mark.revision}:"
                " someone else has written to it"
            )
        if not outcome.alive:
            return _ended(group.author, outcome.author)
        raise Overtaken

    async def _in_doubt(self, group: GroupState, error: FleetplaneError) -> FleetplaneError | None:
        """A commit has failed: find out what became of it."""
        self.failed_commits += 1
        for _ in range(RECONCILE_ATTEMPTS):
            written = await self._was_written(group)
            if written is not None:
                self.writable = written
                return None if written else error
        self._doubt = group
        self.writable = False
        return OutcomeUnknown("the database does not say whether this was written")

    async def _was_written(self, group: GroupState) -> bool | None:
        """Whether the database has the group; None if it cannot be asked, or may still get it."""
        before, author = group.before, self.author or ALONE
        try:
            outcome = await self._engine.settle(before, group.id, author)
        except FleetplaneError:
            return None
        if outcome.written:
            return True
        if self.follower is not None:
            if outcome.mark.number > before.number:
                return False  # its number is taken, by an empty group or by somebody else's
            if not outcome.alive:
                _ended(author, outcome.author)
            return None
        if outcome.mark == before:
            return False
        raise IntegrityError(
            f"the database is at group {outcome.mark.number} instead of {before.number}:"
            " someone else has written to it"
        )

    async def _resolve_doubt(self) -> FleetplaneError | None:
        if self._doubt is None:
            return None
        written = await self._was_written(self._doubt)
        if written is None:
            return Unavailable("the database cannot be read")
        group, self._doubt = self._doubt, None
        if written:
            self._apply(group)
        return None

    async def _catch_up(self) -> None:
        if self.follower is not None:
            await self.follower.catch_up()

    def _apply(self, group: GroupState) -> None:
        if not group.changed:
            return
        if group.after().compacted != self.mark.compacted:
            self._moved.set()
        self.commits += 1
        self.transactions += group.transactions
        self.largest_group = max(self.largest_group, group.transactions)
        self._applier.own(group)

    def _settle(
        self,
        submissions: Sequence[Submission],
        results: Sequence[TransactionResult | None],
        error: FleetplaneError | None,
    ) -> None:
        for submission, result in zip(submissions, results, strict=True):
            submission.behind = ()
            for key in submission.touches:
                if self._last_for_key.get(key) is submission:
                    del self._last_for_key[key]
                shares = self._last_for_kind.get(key.kind, _NONE)
                if shares.get(submission.share) is submission:
                    del shares[submission.share]
                    if not shares:
                        del self._last_for_kind[key.kind]
            if not submission.answer.done():
                # Where others write, what was seen is not confirmed by a group that was not written.
                settled(submission.answer, None if error is not None and self.follower else result, error)
            for waiter in submission.waiters:
                waiter.note()


def _ended(author: GroupAuthor, last: GroupAuthor) -> Unavailable:
    """The database takes nothing from this author: raises if that is so for good."""
    if author.term:
        other = f"{last.server} is active since term {last.term}" if last.term else "another server is active"
        raise Superseded(f"term {author.term} of {author.server} is over: {other}")
    return Unavailable(f"{author.server} could not renew its seat, and must not write before it has")
