"""Pins in both families of messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, Direction, Pull
from fleetplane.domains.boards.agent.pins.rules import Operation
from fleetplane.domains.boards.agent.pins.states import PinState, Reading
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp

_DIRECTIONS: Final[Mapping[int, Direction | None]] = {
    pi.AGENT_GPIO_DIRECTION_UNSPECIFIED: None,
    pi.AGENT_GPIO_DIRECTION_INPUT: Direction.INPUT,
    pi.AGENT_GPIO_DIRECTION_OUTPUT: Direction.OUTPUT,
}
_PULLS: Final[Mapping[int, Pull | None]] = {
    pi.AGENT_GPIO_PULL_MODE_UNSPECIFIED: None,
    pi.AGENT_GPIO_PULL_MODE_NONE: Pull.NONE,
    pi.AGENT_GPIO_PULL_MODE_UP: Pull.UP,
    pi.AGENT_GPIO_PULL_MODE_DOWN: Pull.DOWN,
}
_ACTIONS: Final[Mapping[int, Operation]] = {
    pb.GPIORequest.UNSPECIFIED: Operation.WRITE,
    pb.GPIORequest.WRITE: Operation.WRITE,
    pb.GPIORequest.READ: Operation.READ,
    pb.GPIORequest.CONFIGURE: Operation.CONFIGURE,
    pb.GPIORequest.PWM: Operation.PWM,
    pb.GPIORequest.RELEASE: Operation.RELEASE,
}
DIRECTIONS_OUT: Final = {
    Direction.INPUT: pi.AGENT_GPIO_DIRECTION_INPUT,
    Direction.OUTPUT: pi.AGENT_GPIO_DIRECTION_OUTPUT,
}
PULLS_OUT: Final = {
    Pull.NONE: pi.AGENT_GPIO_PULL_MODE_NONE,
    Pull.UP: pi.AGENT_GPIO_PULL_MODE_UP,
    Pull.DOWN: pi.AGENT_GPIO_PULL_MODE_DOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PinOrder:
    """One request about a pin."""

    operation: Operation
    pin: int
    level: int = LOW
    direction: Direction | None = None
    pull: Pull | None = None
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
    if operation is Operation.WRITE:
        if made.direction is Direction.INPUT:
            raise InvalidArgument("an input cannot be written", field="direction")
        if made.pull is not None and made.direction is None:
            raise InvalidArgument("pull_mode is for a pin whose direction is given", field="pull_mode")
    return made


def direction(value: int) -> Direction | None:
    if value not in _DIRECTIONS:
        raise InvalidArgument(f"direction {value} is not known", field="direction")
    return _DIRECTIONS[value]


def pull(value: int) -> Pull | None:
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


def of_reading(reading: Reading, message: str, *, direction: Direction | None = None) -> pb.GPIOResponse:
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
