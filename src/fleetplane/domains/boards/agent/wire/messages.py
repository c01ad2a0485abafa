"""Commands, logs, health and pins in the documented messages. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.boards.agent.commands.commands import ProgramOutcome
from fleetplane.domains.boards.agent.commands.rules import ProgramRequest
from fleetplane.domains.boards.agent.gpio.chip import HIGH, LOW, LineDirection, LinePull
from fleetplane.domains.boards.agent.health import BoardHealth
from fleetplane.domains.boards.agent.logs import entries as log_entries
from fleetplane.domains.boards.agent.logs.entries import EntryQuery, LogEntry
from fleetplane.domains.boards.agent.pins.lines import PinState, SeenLevel
from fleetplane.domains.boards.agent.pins.rules import PinOperation
from fleetplane.domains.boards.wire.message_json import filled
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


MOMENT_LIMIT_SECONDS: Final = 253_402_300_800
"""The year 10000, where a Timestamp ends."""


def asked(request: pb.CommandRequest) -> ProgramRequest:
    if request.timeout_seconds < 0:
        raise InvalidArgument("timeout_seconds is negative", field="timeout_seconds")
    if request.max_output_bytes < 0:
        raise InvalidArgument("max_output_bytes is negative", field="max_output_bytes")
    return ProgramRequest(
        command=request.command,
        arguments=tuple(request.args),
        profile=request.profile,
        timeout_seconds=request.timeout_seconds,
        working_dir=request.working_dir,
        environment=dict(request.environment),
        stdin=request.stdin,
        max_output_bytes=request.max_output_bytes,
    )


def command_response(outcome: ProgramOutcome) -> pb.CommandResponse:
    ended = outcome.ended
    duration = Duration()
    duration.FromNanoseconds(int(outcome.duration_seconds * 1e9))
    if ended.timed_out:
        reason, words = "TIMED_OUT", "it took too long and was ended"
    elif ended.signal:
        reason, words = "SIGNALLED", f"it was ended by {_signal_name(ended.signal)}"
    elif ended.exit_code:
        reason, words = "EXIT_CODE", f"it ended with code {ended.exit_code}"
    else:
        reason, words = "", "done"
    return filled(
        pb.CommandResponse,
        ended,
        outcome,
        success=not reason,
        message=words,
        duration=duration,
        reason=reason,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_query(request: pb.LogFilter) -> EntryQuery:
    return log_entries.query(
        min_level=request.min_level,
        units=tuple(request.units),
        contains=request.contains,
        regex=request.regex,
        since_ns=_moment_ns("since", request.since) if request.HasField("since") else None,
        until_ns=_moment_ns("until", request.until) if request.HasField("until") else None,
        tail_lines=request.tail_lines,
        follow=request.follow,
        cursor=request.cursor,
        sources=tuple(request.sources),
        current_boot_only=request.current_boot_only,
    )


def _moment_ns(field: str, said: Timestamp) -> int:
    if not 0 <= said.seconds < MOMENT_LIMIT_SECONDS or not 0 <= said.nanos < 1_000_000_000:
        raise InvalidArgument(f"{field} is no moment after 1970", field=field)
    return said.seconds * 1_000_000_000 + said.nanos


def log_entry(entry: LogEntry) -> pb.LogEntry:
    level = pb.LogEntry.LogLevel.Name(entry.level)
    return filled(pb.LogEntry, entry, timestamp=timestamp(entry.at_ns), level=level)


def health_status(
    health: BoardHealth,
    *,
    now_ns: int,
    version: str,
    uptime_seconds: float,
    gpio_available: bool,
    capabilities: Sequence[str],
    node_id: str,
) -> pb.HealthStatus:
    return pb.HealthStatus(
        status=health.status,
        timestamp=timestamp(now_ns),
        version=version,
        uptime=uptime(uptime_seconds),
        gpio_available=gpio_available,
        capabilities=capabilities,
        checks=health_checks(health, now_ns=now_ns),
        node_id=node_id,
    )


def health_checks(health: BoardHealth, *, now_ns: int) -> list[pb.HealthCheckResult]:
    return [
        pb.HealthCheckResult(
            name=check.name, status=check.status, message=check.message, timestamp=timestamp(now_ns)
        )
        for check in health.checks
    ]


def uptime(seconds: float) -> str:
    """As the original programs write durations: `1h2m3s`."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
