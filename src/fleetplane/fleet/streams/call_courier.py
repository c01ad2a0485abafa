"""The ledger's courier for agents that the server calls.

One call carries one command: its end is the target's outcome, and recalling the command cancels the
call. Concurrency is bounded for each target and in total; targets that wait for the total bound are
served in turn. How a target is called belongs to the domain.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import structlog

from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, Commands, CommandState, keep_deadlines
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
