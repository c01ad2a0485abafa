"""Knowing which boards are there: what is heard moves their state, and so does what is not.

A word from a board costs a look at memory; only when it changes something, or ends a silence, is
it written. Silence is noticed by the liveness tracker and written by a reconciler, which tries
again if the store cannot take it.

Boards report by single calls, to any of several servers. There each writes down whom it heard
(`kernel/presence/last_seen.py`), and the active one alone declares silence, from what all have written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import msgspec
import structlog

from fleetplane.domains.boards import rules
from fleetplane.domains.boards.inventory.boards import SERVER, Boards, status_of
from fleetplane.domains.boards.inventory.last_seen import BoardPresence
from fleetplane.domains.boards.joining.join_tokens import Approvals, JoinTokens
from fleetplane.domains.boards.kinds import (
    BOARD,
    SCOPE,
    Board,
    BoardSilence,
    BoardState,
    BoardStatus,
    number_of,
)
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.fleet.streams.silence import SilenceWatch
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.liveness import Liveness, LivenessChanged, LivenessPolicy
from fleetplane.kernel.presence.last_seen import LATE_SECONDS, WRITE_SECONDS, LastSeen
from fleetplane.kernel.reconcile import PassResult, Reason, Reconciler
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.watch import EventType

log = structlog.get_logger(__name__)

CONCURRENCY = 32
"""Boards looked at at once: enough to fill the store's commits, few enough to leave it for others."""
SWEEP_SECONDS = 3600.0
CONDITIONS_LIMIT = 64
"""Of one board: every part of it that is checked, and every service on it that reports."""
LEARN_SECONDS = 10.0
"""Between two looks at whom other servers heard."""
LEEWAY_SECONDS = WRITE_SECONDS + LATE_SECONDS
"""Beyond its time that a board may be unheard: until the server that hears it has written that down."""
STALE_INTERVALS = 3
DEAD_INTERVALS = 10

_SILENCES = {
    Liveness.ONLINE: BoardSilence.NONE,
    Liveness.STALE: BoardSilence.STALE,
    Liveness.DEAD: BoardSilence.DEAD,
}


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
    facts: BoardFacts | None = None
    agent_version: str = ""
    conditions: Sequence[Condition] | None = None
    """By type, what it found out; None if it says nothing about that."""
    boot_id: str = ""
    sequence: int = 0
    """The report's number since that boot; 0 for one without."""


class BoardController:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        boards: Boards,
        presence: BoardPresence,
        approvals: Approvals,
        join_tokens: JoinTokens,
        policy: BoardPolicy,
        attention: StallDetector | None = None,
        heard: LastSeen | None = None,
    ) -> None:
        """`heard` is where several servers note whom they hear; None on a database file."""
        self._store = store
        self._clock = clock
        self._boards = boards
        self._presence = presence
        self._approvals = approvals
        self._join_tokens = join_tokens
        self._policy = policy
        self._watch = SilenceWatch(clock, policy.liveness, attention)
        self._heard = heard
        self._silent: dict[str, Liveness] = {}
        """Boards that the active server has found silent by what all have heard."""
        self._judges = False
        """Whether it is this server that finds them."""
        self._marked = False
        """Whether boards that were unheard when it began to judge are marked so."""
        self._here: dict[str, float] = {}
        """When this server heard each, on the monotonic clock; where several servers do."""
        self._came: dict[str, int] = {}
        """How often each had arrived when that was last told."""
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
        self._note(number)
        if self._heard is None:  # else the active server learns it from the log
            self._tell_of_arrival(number)

    def _tell_of_arrival(self, number: int) -> None:
        for tell in self._arrivals:
            tell(number)

    def _note(self, number: int) -> None:
        if self._heard is None:
            self._watch.heard(str(number))
        else:
            self._here[str(number)] = self._clock.monotonic()
            self._heard.note(str(number))

    async def heard(self, number: int, word: Word, *, actor: str) -> Board:
        """Take a report of a board in: it is alive, and its state may follow from the report."""
        board = self._boards.require(number)
        now_ns = self._clock.now_ns()
        self._presence.seen(number, now_ns=now_ns)
        self._note(number)
        conditions = _merged(board, word.conditions, now_ns=now_ns)
        if not self._is_news(board, word, conditions):
            return board

        def step(status: BoardStatus, at_ns: int) -> BoardStatus:
            spoken = _spoken(status, word)
            if self._heard is not None:  # reports come to several servers, and may overtake each other
                spoken = _counted(spoken, word)
            return msgspec.structs.replace(spoken, last_seen_at_ns=at_ns)

        def merge(found: Board, at_ns: int) -> Sequence[Condition]:
            return _merged(found, word.conditions, now_ns=at_ns)

        try:
            return await self._boards.hear(number, step, facts=word.facts, merge=merge, actor=actor)
        except _OlderReport:
            return board

    async def noted(self, number: int, conditions: Sequence[Condition], *, actor: str) -> Board:
        """Somebody else says how a service on a board is, which is no sign of life of the board."""
        board = self._boards.require(number)
        merged = _merged(board, conditions, now_ns=self._clock.now_ns())
        if tuple(merged) == board.conditions and not self._store.pending(board.key):
            return board
        return await self._boards.hear(
            number,
            lambda status, _now_ns: status,
            merge=lambda found, now_ns: _merged(found, conditions, now_ns=now_ns),
            actor=actor,
        )

    def _is_news(self, board: Board, word: Word, conditions: Sequence[Condition]) -> bool:
        status = status_of(board)
        if self._store.pending(board.key):  # what is in memory may be about to change
            return True
        facts = rules.checked(word.facts).of_machine() if word.facts is not None else BoardFacts()
        return (
            _spoken(status, word) != status
            or rules.merged(board.spec, facts) != board.spec
            or tuple(conditions) != board.conditions
        )

    # Life.

    def take_over(self) -> None:
        """Give boards that were there as long to be heard as they may be silent, from now on."""
        self._came = {board.name: status_of(board).arrivals for board in self._boards.all()}
        self._judges = True
        if self._heard is not None:
            self._heard.begin_to_judge()
            return
        limits = self._policy.liveness
        # Oldest first, which is the order that the tracker keeps.
        for silence, ago in ((BoardSilence.STALE, limits.stale_after_seconds), (BoardSilence.NONE, 0.0)):
            for board in self._boards.all():
                status = status_of(board)
                if status.registered_at_ns is not None and status.silence is silence:
                    self._watch.heard(board.name, seconds_ago=ago)

    async def run_here(self) -> None:
        """What each of several servers does, until cancelled."""
        if self._heard is None:
            return
        async with Boundary() as tasks:
            tasks.keep("boards/heard", self._heard.run_here)
            tasks.keep("boards/silences", self._follow_silences)
            tasks.keep("boards/learn", partial(self._learn, self._heard))

    async def run_active(self) -> None:
        """Write silences down, and see to boards that are deleted, until cancelled."""
        if self._heard is None:
            await self._mark_unheard()
        async with Boundary() as tasks:
            tasks.keep("boards/reconcile", self.reconciler.run)
            if self._heard is None:
                tasks.keep("boards/silence", partial(self._watch.run, self._silence_changed))
            tasks.keep("boards/follow", self._follow_boards)
            tasks.keep("boards/sweep", self._sweep)

    async def _mark_unheard(self) -> None:
        """Let boards that nobody has heard lately read so until they are, or fall silent."""
        limit_ns = round((self._policy.liveness.stale_after_seconds + LEEWAY_SECONDS) * NS)
        since_ns = self._clock.now_ns() - limit_ns
        names = [
            board.name
            for board in self._boards.all()
            if status_of(board).registered_at_ns is not None
            and status_of(board).silence is BoardSilence.NONE
            and not status_of(board).unheard
            and not self._presence.is_heard_since(board, since_ns)
        ]
        await self._tolerated(self._boards.mark_unheard(names))

    def _silence_changed(self, change: LivenessChanged) -> None:
        self.reconciler.enqueue(change.agent)

    async def _look(self, name: str) -> PassResult:
        """Write down how long a board has been silent, as it is by now."""
        state = self._watch.state(name) if self._heard is None else self._silent.get(name, Liveness.ONLINE)
        board = self._boards.get(int(name))
        if board is None or state is None or state is Liveness.ONLINE:  # heard again: whoever heard writes
            return PassResult()
        silence = _SILENCES[state]
        if status_of(board).silence is not silence:
            judged = None if self._heard is None else board.revision
            last_seen = self._presence.last_seen_ns(board)
            await self._boards.silence(int(name), silence, last_seen_at_ns=last_seen, judged=judged)
        missing = DEAD_INTERVALS if silence is BoardSilence.DEAD else STALE_INTERVALS
        return PassResult(explanation=(Reason(code="SILENT", message=f"{missing} reports are missing"),))

    async def _follow_boards(self) -> None:
        async with self._store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    with contained("boards/follow", about=event.resource.name):
                        if event.type is EventType.DELETED:
                            await self._bury(event.resource)
                        else:
                            _tell(event.resource)
                            self._look_for_arrival(event.resource)

    def _look_for_arrival(self, board: Board) -> None:
        arrivals = status_of(board).arrivals
        if self._heard is not None and arrivals != self._came.get(board.name, 0):
            self._came[board.name] = arrivals
            self._tell_of_arrival(number_of(board))

    # Where several servers hear boards.

    async def _learn(self, heard: LastSeen) -> NoReturn:
        """Read when boards were heard by any server; on the active one, find those that are silent."""
        every = min(LEARN_SECONDS, self._policy.heartbeat_seconds)
        while True:
            await self._clock.sleep(every)
            try:
                ages = await heard.read()
            except FleetplaneError as error:  # nobody is silent because the database is
                log.warning("boards.not_learned", error=error.message)
                continue
            now_ns = self._clock.now_ns()
            self._presence.learn(
                {int(name): now_ns - round(age * NS) for name, age in ages.items() if name.isdecimal()}
            )
            if self._judges and not self._marked:
                self._marked = True
                await self._mark_unheard()
            if self._judges and heard.is_settled(self._policy.liveness.stale_after_seconds + LEEWAY_SECONDS):
                self._judge(ages, now_ns)

    def _judge(self, ages: Mapping[str, float], now_ns: int) -> None:
        limits = self._policy.liveness
        silent: dict[str, Liveness] = {}
        for board in self._boards.all():
            status = status_of(board)
            if status.registered_at_ns is None or self._hears(board.name):
                continue
            written = (now_ns - (status.last_seen_at_ns or status.registered_at_ns)) / NS
            age = min(ages.get(board.name, written), written) - LEEWAY_SECONDS
            if age >= limits.dead_after_seconds:
                silent[board.name] = Liveness.DEAD
            elif age >= limits.stale_after_seconds:
                silent[board.name] = Liveness.STALE
        changed = silent.items() ^ self._silent.items()
        self._silent = silent
        for name in {name for name, _ in changed}:
            self.reconciler.enqueue(name)
        # One that was written meanwhile is still as silent as before.
        for name, state in silent.items():
            found = self._boards.get(int(name))
            if found is not None and status_of(found).silence is not _SILENCES[state]:
                self.reconciler.enqueue(name)

    def _hears(self, name: str) -> bool:
        heard_at = self._here.get(name)
        limit = self._policy.liveness.stale_after_seconds
        return heard_at is not None and self._clock.monotonic() - heard_at < limit

    async def _follow_silences(self) -> None:
        """Undo a silence that was declared while this server heard the board."""
        async with self._store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    name = event.resource.name
                    if event.type is EventType.DELETED:
                        self._here.pop(name, None)
                        self._came.pop(name, None)
                        continue
                    found = self._boards.get(int(name))
                    if found is None or not self._hears(name):
                        continue
                    if status_of(found).silence is not BoardSilence.NONE or status_of(found).unheard:
                        await self._tolerated(self.heard(int(name), Word(), actor=SERVER))

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


class _OlderReport(FleetplaneError):
    """A newer report of the board was taken in before, by whichever server."""


def _counted(status: BoardStatus, word: Word) -> BoardStatus:
    """With the number of the report; raises if a newer one is known."""
    if not word.sequence:
        return status
    if word.boot_id in ("", status.boot_id) and word.sequence <= status.sequence:
        raise _OlderReport(f"report {word.sequence} came after report {status.sequence}")
    return msgspec.structs.replace(status, boot_id=word.boot_id or status.boot_id, sequence=word.sequence)


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
