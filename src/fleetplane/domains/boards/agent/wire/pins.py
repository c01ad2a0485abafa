"""Pins in both families of messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, LineDirection, LinePull
from fleetplane.domains.boards.agent.pins.rules import PinOperation
from fleetplane.domains.boards.agent.pins.states import PinState, SeenLevel
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp

_DIRECTIONS: Final[Mapping[int, LineDirection | None]] = {
    pi.AGENT_GPIO_DIRECTION_UNSPECIFIED: None,
    pi.AGENT_GPIO_DIRECTION_INPUT: LineDirection.INPUT,
    pi.AGENT_GPIO_DIRECTION_OUTPUT: LineDirection.OUTPUT,
}
_PULLS: Final[Mapping[int, LinePull | None]] = {
    pi.AGENT_GPIO_PULL_MODE_UNSPECIFIED: None,
    pi.AGENT_GPIO_PULL_MODE_NONE: LinePull.NONE,
    pi.AGENT_GPIO_PULL_MODE_UP: LinePull.UP,
    pi.AGENT_GPIO_PULL_MODE_DOWN: LinePull.DOWN,
}
_ACTIONS: Final[Mapping[int, PinOperation]] = {
    pb.GPIORequest.UNSPECIFIED: PinOperation.WRITE,
    pb.GPIORequest.WRITE: PinOperation.WRITE,
    pb.GPIORequest.READ: PinOperation.READ,
    pb.GPIORequest.CONFIGURE: PinOperation.CONFIGURE,
    pb.GPIORequest.PWM: PinOperation.PWM,
    pb.GPIORequest.RELEASE: PinOperation.RELEASE,
}
DIRECTIONS_OUT: Final = {
    LineDirection.INPUT: pi.AGENT_GPIO_DIRECTION_INPUT,
    LineDirection.OUTPUT: pi.AGENT_GPIO_DIRECTION_OUTPUT,
}
PULLS_OUT: Final = {
    LinePull.NONE: pi.AGENT_GPIO_PULL_MODE_NONE,
    LinePull.UP: pi.AGENT_GPIO_PULL_MODE_UP,
    LinePull.DOWN: pi.AGENT_GPIO_PULL_MODE_DOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOrder:
    """One request about a pin."""

    operation: PinOperation
    pin: int
    level: int = LOW
    direction: LineDirection | None = None
    pull: LinePull | None = None
    frequency_hz: int = 0
    duty_percent: int = 0


def order(request: pb.GPIORequest) -> PinOrder:
    """What is asked for; InvalidArgument for what contradicts itself."""
    operation = _ACTIONS.get(request.action)
    if operation is None:
        raise InvalidArgument(f"action {request.action} is not known", field="action")
    if request.state not in (LOW, HIGH):
        raise InvalidArgument(f"state {request.state} is neither LOW nor HIGH", field="state")
    made = PinOrder(
        operation=operation,
        pin=request.pin,
        level=request.state,
        direction=direction(request.direction),
        pull=pull(request.pull_mode),
        frequency_hz=request.pwm_frequency,
        duty_percent=request.pwm_duty_cycle,
    )
    if operation is PinOperation.WRITE:
        if made.direction is LineDirection.INPUT:
            raise InvalidArgument("an input cannot be written", field="direction")
        if made.pull is not None and made.direction is None:
            raise InvalidArgument("pull_mode is for a pin whose direction is given", field="pull_mode")
    return made


def direction(value: int) -> LineDirection | None:
    if value not in _DIRECTIONS:
        raise InvalidArgument(f"direction {value} is not known", field="direction")
    return _DIRECTIONS[value]


def pull(value: int) -> LinePull | None:
    if value not in _PULLS:
        raise InvalidArgument(f"pull_mode {value} is not known", field="pull_mode")
    return _PULLS[value]


def of_state(state: PinState, message: str) -> pb.GPIOResponse:
    response = pb.GPIOResponse(
        success=True,
        message=message,
        pin=state.pin,
        timestamp=timestamp(state.updated_ns),
        state=pb.GPIORequest.HIGH if state.level else pb.GPIORequest.LOW,
        direction=DIRECTIONS_OUT[state.direction],
        pull_mode=PULLS_OUT[state.pull],
    )
    if state.pwm is not None:
        response.pwm_frequency = state.pwm.frequency_hz
        response.pwm_duty_cycle = state.pwm.duty_percent
        response.reason = "SOFTWARE_PWM" if state.pwm.software else ""
    return response


def of_reading(
    reading: SeenLevel, message: str, *, direction: LineDirection | None = None
) -> pb.GPIOResponse:
    return pb.GPIOResponse(
        success=True,
        message=message,
        pin=reading.pin,
        timestamp=timestamp(reading.at_ns),
        state=pb.GPIORequest.HIGH if reading.level else pb.GPIORequest.LOW,
        direction=DIRECTIONS_OUT[direction] if direction else pi.AGENT_GPIO_DIRECTION_UNSPECIFIED,
    )


def nested_state(state: PinState) -> pi.GPIOPinState:
    return pi.GPIOPinState(
        pin=state.pin,
        direction=DIRECTIONS_OUT[state.direction],
        pull_mode=PULLS_OUT[state.pull],
        value=state.level or 0,
        last_updated=timestamp(state.updated_ns),
    )
