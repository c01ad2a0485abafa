"""Knowing which boards are there: what is heard moves their state, and so does what is not.

A word from a board costs a look at memory; only when it changes something, or ends a silence, is
it written. Silence is noticed by the liveness tracker and written by a reconciler, which tries
again if the store cannot take it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from fleetplane.domains.boards import rules
from fleetplane.domains.boards.inventory.boards import SERVER, Boards, status_of
from fleetplane.domains.boards.inventory.last_seen import Presence
from fleetplane.domains.boards.joining.approvals import Approvals
from fleetplane.domains.boards.joining.join_tokens import JoinTokens
from fleetplane.domains.boards.kinds import (
    BOARD,
    SCOPE,
    Board,
    BoardState,
    BoardStatus,
    Silence,
    number_of,
)
from fleetplane.domains.boards.rules import Facts
from fleetplane.fleet.streams.silence import SilenceWatch
from fleetplane.kernel.attention import Attention
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.liveness import Liveness, LivenessChanged, LivenessPolicy
from fleetplane.kernel.reconcile import Reason, Reconciler, Result
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import EventType

log = structlog.get_logger(__name__)

CONCURRENCY = 32
"""Boards looked at at once: enough to fill the store's commits, few enough to leave it for others."""
SWEEP_SECONDS = 3600.0
CONDITIONS_LIMIT = 64
"""Of one board: every part of it that is checked, and every service on it that reports."""
STALE_INTERVALS = 3
DEAD_INTERVALS = 10

_SILENCES = {Liveness.ONLINE: Silence.NONE, Liveness.STALE: Silence.STALE, Liveness.DEAD: Silence.DEAD}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardPolicy:
    heartbeat_seconds: float = 30.0

    @property
    def liveness(self) -> LivenessPolicy:
        return LivenessPolicy(
            stale_after_seconds=STALE_INTERVALS * self.heartbeat_seconds,
            dead_after_seconds=DEAD_INTERVALS * self.heartbeat_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What a board says of itself in passing."""

    state: BoardState | None = None
    facts: Facts | None = None
    agent_version: str = ""
    conditions: Sequence[Condition] | None = None
    """By type, what it found out; None if it says nothing about that."""


class BoardController:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        boards: Boards,
        presence: Presence,
        approvals: Approvals,
        join_tokens: JoinTokens,
        policy: BoardPolicy,
        attention: Attention | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._boards = boards
        self._presence = presence
        self._approvals = approvals
        self._join_tokens = join_tokens
        self._policy = policy
        self._watch = SilenceWatch(clock, policy.liveness, attention)
        self._arrivals: list[Callable[[int], None]] = []
        self.reconciler = Reconciler(
            "boards/liveness", self._look, clock=clock, store=store, concurrency=CONCURRENCY
        )

    def __repr__(self) -> str:
        return f"<BoardController {self._watch!r}>"

    def on_arrival(self, tell: Callable[[int], None]) -> None:
        """Call `tell` with the number of each board that registers; it must not block or raise."""
        self._arrivals.append(tell)

    # What is heard.

    def came(self, board: Board, *, boot_id: str = "") -> None:
        """An agent has registered."""
        number = number_of(board)
        self._presence.restarted(number, boot_id=boot_id, now_ns=self._clock.now_ns())
        self._watch.heard(str(number))
        for tell in self._arrivals:
            tell(number)

    async def heard(self, number: int, word: Word, *, actor: str) -> Board:
        """Take a report of a board in: it is alive, and its state may follow from the report."""
        board = self._boards.require(number)
        now_ns = self._clock.now_ns()
        self._presence.seen(number, now_ns=now_ns)
        self._watch.heard(str(number))
        conditions = _merged(board, word.conditions, now_ns=now_ns)
        if not self._is_news(board, word, conditions):
            return board

        def step(status: BoardStatus, at_ns: int) -> BoardStatus:
            spoken = _spoken(status, word)
            return msgspec.structs.replace(spoken, last_seen_at_ns=at_ns)

        return await self._boards.hear(number, step, facts=word.facts, conditions=conditions, actor=actor)

    async def noted(self, number: int, conditions: Sequence[Condition], *, actor: str) -> Board:
        """Somebody else says how a service on a board is, which is no sign of life of the board."""
        board = self._boards.require(number)
        merged = _merged(board, conditions, now_ns=self._clock.now_ns())
        if tuple(merged) == board.conditions and not self._store.pending(board.key):
            return board
        return await self._boards.hear(number, lambda status, _now_ns: status, conditions=merged, actor=actor)

    def _is_news(self, board: Board, word: Word, conditions: Sequence[Condition]) -> bool:
        status = status_of(board)
        if self._store.pending(board.key):  # what is in memory may be about to change
            return True
        facts = rules.checked(word.facts).of_machine() if word.facts is not None else Facts()
        return (
            _spoken(status, word) != status
            or rules.merged(board.spec, facts) != board.spec
            or tuple(conditions) != board.conditions
        )

    # Life.

    def take_up(self) -> None:
        """At start: boards that were there have as long to be heard as they may be silent."""
        limits = self._policy.liveness
        # Oldest first, which is the order that the tracker keeps.
        for silence, ago in ((Silence.STALE, limits.stale_after_seconds), (Silence.NONE, 0.0)):
            for board in self._boards.all():
                status = status_of(board)
                if status.registered_at_ns is not None and status.silence is silence:
                    self._watch.heard(board.name, seconds_ago=ago)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run(), name="boards/reconcile")
            tasks.create_task(self._watch.run(self._silence_changed), name="boards/silence")
            tasks.create_task(self._follow_boards(), name="boards/follow")
            tasks.create_task(self._sweep(), name="boards/sweep")

    def _silence_changed(self, change: LivenessChanged) -> None:
        self.reconciler.enqueue(change.agent)

    async def _look(self, name: str) -> Result:
        """Write down how long a board has been silent, as it is by now."""
        state = self._watch.state(name)
        board = self._boards.get(int(name))
        if board is None or state is None or state is Liveness.ONLINE:  # heard again: whoever heard writes
            return Result()
        silence = _SILENCES[state]
        if status_of(board).silence is not silence:
            await self._boards.silence(int(name), silence, last_seen_at_ns=self._presence.last_seen_ns(board))
        missing = DEAD_INTERVALS if silence is Silence.DEAD else STALE_INTERVALS
        return Result(explanation=(Reason(code="SILENT", message=f"{missing} reports are missing"),))

    async def _follow_boards(self) -> None:
        async with self._store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.type is EventType.DELETED:
                        await self._bury(event.resource)
                    else:
                        _tell(event.resource)

    async def _bury(self, board: Board) -> None:
        number = number_of(board)
        self._presence.forget(number)
        self._watch.forget(board.name)
        self.reconciler.forget(board.name)
        log.info("boards.deleted", board=number, name=board.spec.name)
        await self._tolerated(self._approvals.forget(number, actor=SERVER))

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self._tolerated(self._join_tokens.sweep(actor=SERVER))

    async def _tolerated(self, chore: Awaitable[object]) -> None:
        try:
            await chore
        except FleetplaneError as error:  # what is left over does no harm, and is tried again
            log.warning("boards.chore_failed", error=error.message)


def _spoken(status: BoardStatus, word: Word) -> BoardStatus:
    """The status after a report, apart from the time of the report."""
    spoken = rules.heard(status, word.state)
    if word.agent_version:
        spoken = msgspec.structs.replace(spoken, agent_version=word.agent_version)
    return spoken


def _merged(board: Board, found: Sequence[Condition] | None, *, now_ns: int) -> tuple[Condition, ...]:
    """The board's conditions with what it found; one whose status is the same stays word for word.

    Messages have figures in them that change with every report, and are no news.
    """
    kept = {condition.type: condition for condition in board.conditions}
    for condition in found or ():
        before = kept.get(condition.type)
        if before is None and len(kept) >= CONDITIONS_LIMIT:
            continue
        if before is None or before.status != condition.status:
            kept[condition.type] = msgspec.structs.replace(condition, changed_at_ns=now_ns)
    return tuple(kept[name] for name in sorted(kept))


def _tell(board: Board) -> None:
    status = status_of(board)
    if status.state_changed_at_ns == board.updated_at_ns:
        log.info(
            "boards.state_changed",
            board=number_of(board),
            name=board.spec.name,
            state=status.state.value,
            before=status.previous_state.value if status.previous_state is not None else "",
        )
