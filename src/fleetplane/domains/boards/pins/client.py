"""The pins of a board, at the board: what its agent is asked, in the words that it knows.

Our own agents are asked by `ControlGPIO`, which takes a lease and drives a level in the claim
itself. Original agents know four methods instead, and answer some refusals with OK; there a pin is
configured first and driven then, and leases stay with this server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.boards.calls.channels import FENCE_FIELD, LEASE_FIELD, CallOrigin, NodeLinks
from fleetplane.domains.boards.calls.errors import refused
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.pins.kinds import Direction, Pull
from fleetplane.domains.boards.pins.rules import Drive, GiveUpPin, Listen, PinSeen, Wave
from fleetplane.domains.boards.pins.turns import PinTurn
from fleetplane.domains.boards.wire import boards as wire
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, Unimplemented

PINS_LIMIT: Final = 64
"""Of those that a board names: it has 28."""

_DIRECTIONS: Final = {
    Direction.INPUT: pi_agent.AGENT_GPIO_DIRECTION_INPUT,
    Direction.OUTPUT: pi_agent.AGENT_GPIO_DIRECTION_OUTPUT,
}
_PULLS: Final = {
    Pull.NONE: pi_agent.AGENT_GPIO_PULL_MODE_NONE,
    Pull.UP: pi_agent.AGENT_GPIO_PULL_MODE_UP,
    Pull.DOWN: pi_agent.AGENT_GPIO_PULL_MODE_DOWN,
}
_PULLS_BACK: Final = {int(number): pull for pull, number in _PULLS.items()}
_NOT_AN_OUTPUT: Final = frozenset({"input", "unconfigured", "released"})
"""Causes for which a board refuses to write a pin that it could drive if it were configured so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The lease to tell a board of."""

    id: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    level: int
    at_ns: int


class PinsOfNode:
    def __init__(self, links: NodeLinks, boards: Boards, clock: Clock) -> None:
        self._links = links
        self._boards = boards
        self._clock = clock

    def __repr__(self) -> str:
        return f"<NodePins over {self._links!r}>"

    async def listed(self, board: int, *, asked: CallOrigin) -> dict[int, PinSeen]:
        """By pin, those that the board has configured."""
        answer = await self._links.call(
            board,
            lambda link: link.original.ListConfiguredPins,
            pi_agent.ListConfiguredPinsRequest(),
            pi_agent.ListConfiguredPinsResponse,
            asked=asked,
        )
        return {state.pin: _seen(state) for state in answer.pins[:PINS_LIMIT]}

    async def read(self, board: int, pin: int, *, pull: Pull = Pull.NONE, asked: CallOrigin) -> Read:
        """The level on the wire now; a pin that is nothing yet becomes an input."""
        if self._is_original(board):
            return await self._original_read(board, pin, pull, asked)
        answer = await self._control(board, pb.GPIORequest(pin=pin, action=pb.GPIORequest.READ), asked)
        return Read(level=int(answer.state), at_ns=self._at_ns(answer.timestamp))

    async def apply(
        self,
        turn: PinTurn,
        wanted: GiveUpPin | Listen | Drive | Wave,
        *,
        asked: CallOrigin,
        hold: Hold | None = None,
    ) -> None:
        """Have the board of a device make its pin what it should be, whatever it is."""
        board, pin = turn.device.spec.board, turn.device.spec.pin
        if self._is_original(board):
            await self._original_apply(board, pin, wanted, asked, turn)
            return
        match wanted:
            case GiveUpPin():
                request = pb.GPIORequest(pin=pin, action=pb.GPIORequest.RELEASE)
            case Listen(pull=pull):
                request = _configure(pin, Direction.INPUT, pull)
            case Drive(level=level):
                await self._drive(board, pin, wanted, level, asked, hold, turn)
                return
            case Wave(frequency_hz=frequency, duty_percent=duty):
                request = pb.GPIORequest(
                    pin=pin, action=pb.GPIORequest.PWM, pwm_frequency=frequency, pwm_duty_cycle=duty
                )
        await self._control(board, request, asked, hold, turn)

    # Our own agents.

    async def _drive(
        self,
        board: int,
        pin: int,
        wanted: Drive,
        level: int,
        asked: CallOrigin,
        hold: Hold | None,
        turn: PinTurn,
    ) -> None:
        state = pb.GPIORequest.HIGH if level else pb.GPIORequest.LOW
        write = pb.GPIORequest(pin=pin, state=state, action=pb.GPIORequest.WRITE)
        try:
            await self._control(board, write, asked, hold, turn)
        except FailedPrecondition as error:
            if error.details.get("cause") not in _NOT_AN_OUTPUT:
                raise
            request = _configure(pin, Direction.OUTPUT, wanted.pull)
            request.state = state
            await self._control(board, request, asked, hold, turn)

    async def _control(
        self,
        board: int,
        request: pb.GPIORequest,
        asked: CallOrigin,
        hold: Hold | None = None,
        turn: PinTurn | None = None,
    ) -> pb.GPIOResponse:
        more: list[tuple[str, str]] = []
        if hold is not None:
            request.lease_id = hold.id
            more.append((LEASE_FIELD, f"{hold.seconds:.3f}"))
        if turn is not None and (fence := turn.order(self._clock)) is not None:
            more.append((FENCE_FIELD, str(fence)))
        answer = await self._links.call(
            board, lambda link: link.node.ControlGPIO, request, pb.GPIOResponse, asked=asked, more=more
        )
        if not answer.success:
            raise refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                answer.message or "refused",
                board=board,
                reason=answer.reason,
                details={},
            )
        return answer

    # Original agents.

    async def _original_apply(
        self,
        board: int,
        pin: int,
        wanted: GiveUpPin | Listen | Drive | Wave,
        asked: CallOrigin,
        turn: PinTurn,
    ) -> None:
        turn.order(self._clock)  # they do not know such things; only that it is not too late
        match wanted:
            case GiveUpPin():  # they know no way to give a pin up: an input drives nothing
                await self._original_configure(board, pin, Direction.INPUT, Pull.NONE, asked)
            case Listen(pull=pull):
                await self._original_configure(board, pin, Direction.INPUT, pull, asked)
            case Drive(level=level, pull=pull):
                try:
                    await self._original_write(board, pin, level, asked)
                except FleetplaneError as error:
                    if error.details.get("code") == grpc.StatusCode.UNAVAILABLE.name:
                        raise
                    turn.order(self._clock)
                    await self._original_configure(board, pin, Direction.OUTPUT, pull, asked)
                    await self._original_write(board, pin, level, asked)
            case Wave(frequency_hz=frequency, duty_percent=duty):
                request = pi_agent.SetGPIOPWMRequest(pin=pin, frequency=frequency, duty_cycle=duty)
                answer = await self._links.call(
                    board,
                    lambda link: link.original.SetGPIOPWM,
                    request,
                    pi_agent.SetGPIOPWMResponse,
                    asked=asked,
                )
                if not answer.success:
                    raise _unsuccessful(board, answer.message)

    async def _original_configure(
        self, board: int, pin: int, direction: Direction, pull: Pull, asked: CallOrigin
    ) -> None:
        request = pi_agent.ConfigureGPIOPinRequest(
            pin=pin, direction=_DIRECTIONS[direction], pull_mode=_PULLS[pull]
        )
        answer = await self._links.call(
            board,
            lambda link: link.original.ConfigureGPIOPin,
            request,
            pi_agent.ConfigureGPIOPinResponse,
            asked=asked,
        )
        if not answer.success:
            raise _unsuccessful(board, answer.message)

    async def _original_write(self, board: int, pin: int, level: int, asked: CallOrigin) -> None:
        await self._links.call(
            board,
            lambda link: link.original.WriteGPIOPin,
            pi_agent.WriteGPIOPinRequest(pin=pin, value=level),
            pi_agent.WriteGPIOPinResponse,
            asked=asked,
        )

    async def _original_read(self, board: int, pin: int, pull: Pull, asked: CallOrigin) -> Read:
        request = pi_agent.ReadGPIOPinRequest(pin=pin)

        async def attempt() -> Read:
            answer = await self._links.call(
                board,
                lambda link: link.original.ReadGPIOPin,
                request,
                pi_agent.ReadGPIOPinResponse,
                asked=asked,
            )
            return Read(level=int(answer.value > 0), at_ns=self._at_ns(answer.timestamp))

        try:
            return await attempt()
        except FleetplaneError as error:
            if error.details.get("code") == grpc.StatusCode.UNAVAILABLE.name:
                raise
        await self._original_configure(board, pin, Direction.INPUT, pull, asked)
        return await attempt()

    def _is_original(self, board: int) -> bool:
        return status_of(self._boards.require(board)).speaks_original

    def _at_ns(self, said: Timestamp) -> int:
        """When the board says it was, unless its clock is ahead of ours."""
        now_ns = self._clock.now_ns()
        return min(wire.moment_ns(said) or now_ns, now_ns)


def _configure(pin: int, direction: Direction, pull: Pull) -> pb.GPIORequest:
    return pb.GPIORequest(
        pin=pin, action=pb.GPIORequest.CONFIGURE, direction=_DIRECTIONS[direction], pull_mode=_PULLS[pull]
    )


def _seen(state: pi_agent.GPIOPinState) -> PinSeen:
    output = state.direction == pi_agent.AGENT_GPIO_DIRECTION_OUTPUT
    return PinSeen(
        pin=state.pin,
        direction=Direction.OUTPUT if output else Direction.INPUT,
        pull=_PULLS_BACK.get(state.pull_mode, Pull.NONE),
        level=int(state.value > 0),
    )


def _unsuccessful(board: int, message: str) -> FleetplaneError:
    """Original agents do not say why, other than in words."""
    words = message or "refused without a word"
    if "not supported" in words or "not implemented" in words:
        return Unimplemented(f"board {board}: {words}", details={"board": str(board)})
    return refused(grpc.StatusCode.FAILED_PRECONDITION, words, board=board, reason="", details={})
