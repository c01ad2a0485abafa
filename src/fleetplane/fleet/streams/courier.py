"""Two couriers of the ledger: over streams that agents hold, and by calls of the server.

`StreamCourier` queues commands on streams, up to a number in flight for each agent, and recalls them. A
command is in flight until the agent answers, its deadline has passed or the stream ends. The encoding
belongs to the domain: its `CommandProtocol`.

`CallCourier` makes one call for one command: its end is the target's outcome, and recalling the command
cancels the call. Concurrency is bounded for each target and in total; targets that wait for the total bound
are served in turn. How a target is called belongs to the domain.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import structlog

from fleetplane.fleet.streams.presence import F, Flight, L, Live, Out, Presences
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, Commands, CommandState, keep_deadlines
from fleetplane.kernel.commands.rules import TOO_LATE
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.stalls import StallDetector

log = structlog.get_logger(__name__)

DEFECT_CHARACTERS = 256
"""Of an error that is our own, told as a command's outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What a call came to."""

    state: CommandState
    detail: str = ""
    result: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    tasks: Boundary
    ledger: Commands


class CallCourier:
    """Keeps `kernel.commands.Courier`, while it runs."""

    def __init__(
        self,
        *,
        channel: str,
        per_target: int,
        at_once: int,
        is_present: Callable[[str], bool],
        call: Callable[[str, Command], Awaitable[Answered | None]],
    ) -> None:
        """`call` may answer None: there is no such target any more, and nobody to have an outcome."""
        self._channel = channel
        self._per_target = per_target
        self.at_once = at_once
        self._is_present = is_present
        self._call = call
        self._flights: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Calls under way, by target and command."""
        self._of_target: Counter[str] = Counter()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        """Targets that had room themselves when there was none in all."""
        self._running: Running | None = None

    def __repr__(self) -> str:
        return f"<CallCourier {self._channel} under_way={len(self._flights)}>"

    @property
    def under_way(self) -> int:
        return len(self._flights)

    # For the ledger.

    def is_present(self, target: str) -> bool:
        return self._running is not None and self._is_present(target)

    def has_room(self, target: str) -> bool:
        if self._of_target[target] >= self._per_target:
            return False
        if len(self._flights) >= self.at_once:
            self._waiting[target] = None
            return False
        return True

    def deliver(self, target: str, command: Command) -> bool:
        if self._running is None or not self.is_present(target) or not self.has_room(target):
            return False
        self._of_target[target] += 1
        flight = self._running.tasks.once(
            f"{self._channel}/command",
            partial(self._carry, target, command, self._running.ledger),
            about=f"{command.name}/{target}",
        )
        self._flights[target, command.name] = flight
        flight.add_done_callback(lambda _flight: self._left(target, command.name))
        return True

    def recall(self, target: str, command: str, reason: str) -> None:  # noqa: ARG002  # targets are told by the call's end
        flight = self._flights.get((target, command))
        if flight is not None:
            flight.cancel()

    # Carrying.

    async def run(self, ledger: Commands, clock: Clock, attention: StallDetector | None = None) -> None:
        """Carry commands and keep the ledger's deadlines until cancelled; calls under way end then.

        Beside the ledger's `run_here`.
        """
        async with Boundary() as tasks:
            self._running = Running(tasks=tasks, ledger=ledger)
            try:
                keeping = partial(keep_deadlines, ledger, clock, attention)
                await tasks.keep(f"{self._channel}/deadlines", keeping)
            finally:
                self._running = None

    async def _carry(self, target: str, command: Command, ledger: Commands) -> None:
        answered = await self._answer(target, command)
        if answered is not None:
            await self._tell(target, command.name, answered, ledger)

    def _left(self, target: str, command: str) -> None:
        """A call has ended, or was taken back, maybe before it began: its place is free for others."""
        del self._flights[target, command]
        self._of_target[target] -= 1
        if not self._of_target[target]:
            del self._of_target[target]
        if self._running is not None:
            self._running.tasks.once(
                f"{self._channel}/room",
                partial(self._room_for_others, target, self._running.ledger),
                about=target,
            )

    async def _answer(self, target: str, command: Command) -> Answered | None:
        try:
            return await self._call(target, command)
        except Exception as error:  # a defect must cost this command its outcome, and no other
            log.exception(self._event("command_broken"), command=command.name, target=target)
            text = f"{type(error).__name__}: {error}"[:DEFECT_CHARACTERS]
            return Answered(state=CommandState.FAILED, detail=text)

    async def _tell(self, target: str, command: str, answered: Answered, ledger: Commands) -> None:
        try:
            await ledger.ended(
                target, command, answered.state, detail=answered.detail, result=answered.result
            )
        except FleetplaneError as error:  # the ledger's own deadline ends it
            log.error(self._event("outcome_not_kept"), command=command, target=target, error=error.message)

    async def _room_for_others(self, target: str, ledger: Commands) -> None:
        """One call fewer: this target may have the next, or one that found no room in all."""
        candidates = [target]
        if self._waiting:
            candidates.append(self._waiting.popitem(last=False)[0])
        for name in candidates:
            try:
                await ledger.room(name)
            except FleetplaneError as error:
                log.error(self._event("command_not_sent"), target=name, error=error.message)

    def _event(self, name: str) -> str:
        return f"{self._channel}.{name}"


TICK_SECONDS = 1.0
"""How late the place of a command whose time is over is given up; times are counted in seconds."""


Out_co = TypeVar("Out_co", covariant=True)
F_co = TypeVar("F_co", bound=Flight, covariant=True)
L_contra = TypeVar("L_contra", bound=Live[Any, Any], contravariant=True)


class CommandProtocol(Protocol[Out_co, L_contra, F_co]):
    """The domain's part."""

    def takes_work(self, live: L_contra) -> bool: ...

    def room(self, live: L_contra) -> int:
        """How many commands the agent can have at once."""

    def encode(self, live: L_contra, command: Command) -> tuple[Out_co, F_co]:
        """The message for this stream, and what is remembered meanwhile; raises if it cannot be sent."""

    def encode_recall(self, live: L_contra, command: str, reason: str) -> Out_co | None:
        """The message that takes a command back; None if agents know none."""


class StreamCourier(Generic[Out, L, F]):
    """Keeps `kernel.commands.Courier`."""

    def __init__(
        self, presences: Presences[L], protocol: CommandProtocol[Out, L, F], clock: Clock, *, channel: str
    ) -> None:
        self._presences = presences
        self._protocol = protocol
        self._clock = clock
        self._channel = channel
        self._work = f"{channel}/commands"

    def __repr__(self) -> str:
        return f"<StreamCourier {self._channel} {self._presences!r}>"

    # For the ledger.

    def is_present(self, target: str) -> bool:
        """Whether it takes work: one that is about to stop, for example, does not."""
        live = self._presences.get(target)
        return live is not None and self._protocol.takes_work(live)

    def has_room(self, target: str) -> bool:
        live = self._presences.get(target)
        return live is not None and len(live.flights) < self._protocol.room(live)

    def deliver(self, target: str, command: Command) -> bool:
        live = self._presences.get(target)
        if live is None or not (self._protocol.takes_work(live) and self.has_room(target)):
            return False
        message, flight = self._protocol.encode(live, command)
        if not live.session.offer(message):
            return False
        live.flights[command.name] = flight
        return True

    def recall(self, target: str, command: str, reason: str) -> None:
        """Tell the agent to stop. Its place is taken until it answers or its time is over."""
        live = self._presences.get(target)
        if live is not None:
            self._recall(live, command, reason)

    def _recall(self, live: L, command: str, reason: str) -> None:
        flight = live.flights.get(command)
        if flight is None or flight.recalled:
            return
        flight.recalled = True
        message = self._protocol.encode_recall(live, command, reason)
        if message is not None:
            live.session.offer(message)

    # For the domain.

    def landed(self, live: L, command: str) -> F | None:
        """The agent has answered: what was remembered of the command, if it had it on this stream.

        Its place is free then; once the answer is written down, call the ledger's `room`.
        """
        flight: F | None = live.flights.pop(command, None)
        return flight

    async def expire(self, ledger: Commands) -> None:
        """Give up the places of commands whose time is over, and send what waits for them.

        Whoever was not told to stop by then is: the ledger says so as soon as it has written the end of a
        command down, and finds no place of it any more if this comes first.
        """
        now_ns = self._clock.now_ns()
        for live in self._presences:
            late = [command for command, flight in live.flights.items() if flight.over_at_ns <= now_ns]
            for command in late:
                self._recall(live, command, TOO_LATE)
                del live.flights[command]
            if late:
                with contained(self._work, about=live.agent):  # nothing is lost: the ledger tries again
                    await ledger.room(live.agent)

    async def run(self, ledger: Commands, attention: StallDetector) -> NoReturn:
        """Until cancelled. Nothing is over right after a gap of the server's own."""
        while True:
            await self._clock.sleep(TICK_SECONDS)
            if attention.settled:
                await self.expire(ledger)
