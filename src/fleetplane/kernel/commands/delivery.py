"""Delivery of commands to targets whose session is on this server, and the output of targets for a while.

A command is recorded as sent, in the session that it goes out on, before it is sent. On a database
file this server has all sessions. Among several servers, each delivers to its own targets what others
have issued or cancelled. Outputs are kept in memory, bounded, and end with the server.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import structlog

from fleetplane.kernel.boundary import note
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import rules
from fleetplane.kernel.commands.book import TargetBook
from fleetplane.kernel.commands.courier import CommandLimits, Courier
from fleetplane.kernel.commands.rules import (
    COMMAND_TARGET,
    Command,
    CommandState,
    CommandStep,
    CommandTarget,
    Move,
    state_of,
)
from fleetplane.kernel.commands.sessions import SessionRules
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.events import EventBatch
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, follow
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.watch import Watch

OUTPUT_LIMIT = 64 * 1024
"""Characters kept of one target's output, its end: that is where errors are."""
OUTPUTS_LIMIT = 4 * 1024 * 1024
"""Characters kept in all; the oldest go first."""


class Outputs:
    def __init__(self, *, limit: int = OUTPUTS_LIMIT) -> None:
        self._limit = limit
        self._held = 0
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Outputs {len(self._texts)} characters={self._held}>"

    def add(self, command: str, target: str, text: str) -> None:
        known = self._texts.pop((command, target), "")
        kept = (known + text)[-OUTPUT_LIMIT:]
        self._texts[command, target] = kept
        self._held += len(kept) - len(known)
        while self._held > self._limit:
            _, oldest = self._texts.popitem(last=False)
            self._held -= len(oldest)

    def get(self, command: str, target: str) -> str:
        return self._texts.get((command, target), "")

    def forget(self, command: str, target: str) -> None:
        self._held -= len(self._texts.pop((command, target), ""))


log = structlog.get_logger(__name__)

ENDED_BY_OTHERS = frozenset({CommandState.CANCELLED, CommandState.TIMED_OUT})
"""Ends of which a target may know nothing."""

First = Callable[[Draft], Mapping[str, tuple[CommandState, int]]]
"""The first state of each target, with the session that it is sent in."""


class Delivery:
    def __init__(
        self, book: TargetBook, courier: Courier, sessions: SessionRules, clock: Clock, limits: CommandLimits
    ) -> None:
        self._book = book
        self._courier = courier
        self._sessions = sessions
        self._clock = clock
        self._limits = limits
        self._waiting: dict[str, None] = {}
        """Targets here for which something may wait, to be looked at."""
        self._again: dict[str, None] = {}
        """Those to be looked at once more, after a while."""
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Delivery {self._book.channel} waiting={len(self._waiting)}>"

    # The beginning.

    def first_states(self, targets: Sequence[str], *, wait: bool, hold: bool) -> First:
        """How a new command begins with each of its targets."""
        if hold:
            held = dict.fromkeys(targets, (CommandState.HELD, 0))
            return lambda _: held
        if not self._sessions.shared:
            known = {name: (self._first_state(name, wait=wait), 0) for name in targets}
            return lambda _: known
        ready = {name: self._ready(name) for name in targets}
        return lambda draft: {
            name: self._sessions.first_state(draft, name, session, wait=wait)
            for name, session in ready.items()
        }

    def _first_state(self, target: str, *, wait: bool) -> CommandState:
        if self._courier.is_present(target):
            return CommandState.SENT if self._courier.has_room(target) else CommandState.WAITING
        return CommandState.WAITING if wait else CommandState.UNDELIVERABLE

    def _ready(self, target: str) -> int | None:
        """The session in which a target could be sent something from here, now."""
        session = self._sessions.here(target)
        takes = self._courier.is_present(target) and self._courier.has_room(target)
        return session if takes else None

    def released(self, key: Key, target: str, *, wait: bool) -> Move:
        """A held command may go to a target: sent, if it is here; else it waits, or there is nobody."""
        if not self._sessions.shared:
            going = {
                CommandState.SENT: (CommandStep.HAND_OVER,),
                CommandState.UNDELIVERABLE: (CommandStep.NOBODY,),
            }
            further = going.get(self._first_state(target, wait=wait), ())
            return Move(key=key, steps=(CommandStep.RELEASE, *further), detail=rules.AWAY)
        session = self._ready(target)
        return Move(
            key=key,
            steps=(
                CommandStep.RELEASE,
                *((CommandStep.HAND_OVER,) if session is not None else ()),
                *(() if wait else (CommandStep.NOBODY,)),
            ),
            detail=rules.AWAY,
            session=session or 0,
            only_if=self._sessions.handing_over(session or 0),
        )

    async def look_again(self, keys: Iterable[Key]) -> None:
        """What was written down as waiting: its target may have got room, or gone, meanwhile."""
        away = []
        for key in keys:
            target = self._book.find(key)
            command = self._book.command_of(target) if target is not None else None
            if target is None or command is None or state_of(target) is not CommandState.WAITING:
                continue
            if self._courier.is_present(target.spec.target):
                await self.room(target.spec.target)
            elif not command.spec.wait and not self._sessions.shared:  # else that was decided by presence
                away.append(Move(key=key, steps=(CommandStep.NOBODY,), detail=rules.AWAY))
        await self._book.move(away)

    # Sending.

    async def room(self, target: str) -> None:
        """The target can take something: send what waits, in order, for as long as it can."""
        for key in self._book.index.of(target):
            session = self._ready(target)
            if session is None:
                return
            found = self._book.find(key)
            if found is not None and state_of(found) is CommandState.WAITING:
                await self.deliver(await self._book.move([self._handed_over(key, session)]))

    def _handed_over(self, key: Key, session: int) -> Move:
        return Move(
            key=key,
            steps=(CommandStep.HAND_OVER,),
            session=session,
            only_if=self._sessions.handing_over(session),
        )

    async def deliver(self, keys: Iterable[Key]) -> None:
        """Send what is written down as sent; take back what no session took."""
        returned = []
        for key in keys:
            target = self._book.find(key)
            if target is None or state_of(target) is not CommandState.SENT:
                continue  # cancelled or answered meanwhile
            command = self._book.command_of(target)
            if command is None:
                continue
            try:
                if not self._sent(target, command):
                    returned.append(self._turned_back(target, command))
            except Exception as error:  # one that cannot be sent costs its own outcome, and holds up no other
                note(f"commands/{self._book.channel}/deliver", error, about=key)
                returned.append(self._unsendable(target, error))
        await self._book.move(returned)
        retry_ns = self._clock.now_ns() + round(self._limits.retry_seconds * NS)
        for move in returned:
            self._book.index.look_again(retry_ns, move.key)
            if self._sessions.shared:
                self._again[move.key.name] = None

    def _sent(self, target: CommandTarget, command: Command) -> bool:
        assert target.status is not None
        name = target.spec.target
        return self._sessions.here(name) == target.status.session and self._courier.deliver(name, command)

    def _unsendable(self, target: CommandTarget, error: Exception) -> Move:
        assert target.status is not None
        text = error.message if isinstance(error, FleetplaneError) else f"{type(error).__name__}: {error}"
        return Move(
            key=target.key,
            steps=(CommandStep.TURN_BACK, CommandStep.UNSENDABLE),
            detail=f"it cannot be sent: {text}",
            only_if=self._sessions.turning_back(target.status.session, refused=True),
        )

    def _turned_back(self, target: CommandTarget, command: Command) -> Move:
        assert target.status is not None
        name, session = target.spec.target, target.status.session
        there = self._sessions.here(name) == session and self._courier.is_present(name)
        busy = there and not self._courier.has_room(name)
        return Move(
            key=target.key,
            steps=(CommandStep.TURN_BACK,)
            if command.spec.wait or busy
            else (CommandStep.TURN_BACK, CommandStep.NOBODY),
            detail="no session took it",
            only_if=self._sessions.turning_back(session, refused=there),
        )

    # Among several servers.

    async def follow(self) -> None:
        """Take in what any server writes about targets, until cancelled."""
        async for batch in follow(self._book.store, COMMAND_TARGET, begin=self._begin):
            self._take_in(batch)

    def _begin(self, watch: Watch) -> None:
        self._book.recover()
        # By whoever publishes it, so that the index is never behind what transactions have seen.
        watch.push_to(self._take_in)

    def _take_in(self, batch: EventBatch) -> None:
        for event in batch.events:
            target = self._book.noted(event.resource.key)
            session = self._sessions.here(event.resource.name) if target is not None else None
            if target is None or session is None:
                continue
            status = target.status
            assert status is not None
            if status.state is CommandState.WAITING:
                self._waiting[target.spec.target] = None
                self._news.set()
            elif status.session == session and (status.told_to_stop or status.state in ENDED_BY_OTHERS):
                self._courier.recall(target.spec.target, target.spec.command, status.detail)

    async def hand_over(self) -> None:
        """Send what waits for targets that are here, whoever has issued it, until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            names, self._waiting = self._waiting, {}
            try:
                await self._send(names)
            except Exception as error:  # it stays written down
                note(f"commands/{self._book.channel}/hand_over", error)
                self._again.update(names)

    async def retry(self) -> None:
        """Look once more at what could not be sent, until cancelled."""
        while True:
            await self._clock.sleep(self._limits.retry_seconds)
            if self._again:
                again, self._again = self._again, {}
                self._waiting.update(again)
                self._news.set()

    async def _send(self, names: Iterable[str]) -> None:
        """One command for each target at a time, and as many targets as there are in one transaction."""
        while True:
            moves = [move for name in names if (move := self._next(name)) is not None]
            if not moves:
                return
            moved = await self._book.move(moves)
            await self.deliver(moved)
            names = [key.name for key in moved]

    def _next(self, target: str) -> Move | None:
        """Hand over the first command that waits for a target, if it has room."""
        session = self._ready(target)
        if session is None:
            return None
        for key in self._book.index.of(target):
            found = self._book.find(key)
            if found is not None and state_of(found) is CommandState.WAITING:
                return self._handed_over(key, session)
        return None
