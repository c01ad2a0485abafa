"""The ledger's courier for agents that hold a stream.

Queues commands on streams, up to a number in flight for each agent, and recalls them. A command is in
flight until the agent answers, its deadline has passed or the stream ends. The encoding belongs to the
domain: its `CommandProtocol`.
"""

from __future__ import annotations

from typing import Any, Generic, NoReturn, Protocol, TypeVar

import structlog

from fleetplane.fleet.streams.presence import F, Flight, L, Live, Out, Presences
from fleetplane.kernel.boundary import contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, Commands
from fleetplane.kernel.commands.steps import TOO_LATE
from fleetplane.kernel.stalls import StallDetector

log = structlog.get_logger(__name__)

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
