"""What follows for a board from what is wanted of a pin; leases; what is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.boards.pins import rules
from fleetplane.domains.boards.pins.kinds import (
    Device,
    DeviceState,
    DeviceType,
    Direction,
    GpioConfig,
    GpioSpec,
    GpioStatus,
    PinHold,
    Pull,
)
from fleetplane.domains.boards.pins.rules import Drive, GiveUpPin, LeaveAlone, Listen, PinSeen, Wave
from fleetplane.kernel.errors import Conflict, FailedPrecondition, InvalidArgument, PermissionDenied
from fleetplane.kernel.resources import Resource
from fleetplane.kernel.values.times import NS

OUTPUT = GpioSpec(name="lamp", board=1, pin=17, direction=Direction.OUTPUT)
INPUT = GpioSpec(name="button", board=1, pin=17, pull=Pull.UP)
PWM = GpioSpec(
    name="fan",
    board=1,
    pin=18,
    direction=Direction.OUTPUT,
    device_type=DeviceType.PWM,
    config=GpioConfig(frequency=50),
)
HELD = GpioStatus(held=True, applied_generation=1)


def device(spec: GpioSpec, status: GpioStatus | None = None, *, generation: int = 1) -> Device:
    return Resource(
        kind="board-gpio",
        scope="boards",
        name="1",
        uid="u",
        labels={},
        spec=spec,
        status=status or GpioStatus(),
        conditions=(),
        revision=1,
        created_revision=1,
        generation=generation,
        created_at_ns=0,
        updated_at_ns=0,
    )


def changed(spec: GpioSpec, **fields: object) -> GpioSpec:
    return msgspec.structs.replace(spec, **fields)


@pytest.mark.parametrize(
    ("spec", "held", "wanted"),
    [
        (INPUT, False, Listen(pull=Pull.UP)),
        (OUTPUT, False, LeaveAlone()),
        (OUTPUT, True, GiveUpPin()),
        (changed(OUTPUT, level=1), False, Drive(level=1, pull=Pull.NONE)),
        (changed(OUTPUT, level=0), True, Drive(level=0, pull=Pull.NONE)),
        (changed(OUTPUT, level=1, enabled=False), True, GiveUpPin()),
        (changed(OUTPUT, level=1, enabled=False), False, LeaveAlone()),
        (changed(INPUT, removing=True), True, GiveUpPin()),
        (PWM, False, LeaveAlone()),
        (changed(PWM, level=30), False, Wave(frequency_hz=50, duty_percent=30)),
        (
            changed(PWM, config=GpioConfig(frequency=50, duty_cycle=10)),
            False,
            Wave(frequency_hz=50, duty_percent=10),
        ),
        (changed(PWM, level=30, config=GpioConfig()), False, LeaveAlone()),
        (changed(INPUT, device_type=DeviceType.SPI), False, LeaveAlone()),
    ],
)
def test_what_a_board_is_to_do(spec: GpioSpec, held: bool, wanted: rules.Wish) -> None:
    assert rules.wish(device(spec, GpioStatus(held=held))) == wanted


def test_a_lease_that_the_board_still_keeps_is_given_up_before_anything_is_driven() -> None:
    status = GpioStatus(owed_lease_id="old")
    driven = device(changed(OUTPUT, level=1), status)

    assert rules.wish(driven) == GiveUpPin()
    assert not rules.is_met(GiveUpPin(), driven, None)


SEEN = PinSeen(pin=17, direction=Direction.OUTPUT, pull=Pull.NONE, level=1)


@pytest.mark.parametrize(
    ("spec", "seen", "generation", "met"),
    [
        (changed(OUTPUT, level=1), SEEN, 1, True),
        (changed(OUTPUT, level=0), SEEN, 1, False),
        (changed(OUTPUT, level=1), None, 1, False),
        (changed(OUTPUT, level=1), SEEN, 2, False),
        (INPUT, PinSeen(pin=17, direction=Direction.INPUT, pull=Pull.UP, level=0), 1, True),
        (INPUT, PinSeen(pin=17, direction=Direction.INPUT, pull=Pull.NONE, level=0), 1, False),
        (INPUT, SEEN, 1, False),
        (changed(OUTPUT, enabled=False), SEEN, 1, False),
        (changed(OUTPUT, enabled=False), None, 1, True),
        (changed(PWM, level=30), SEEN, 1, True),
        (changed(PWM, level=30), SEEN, 2, False),
    ],
)
def test_when_a_board_needs_nothing_done(
    spec: GpioSpec, seen: PinSeen | None, generation: int, met: bool
) -> None:
    found = device(spec, HELD, generation=generation)

    assert rules.is_met(rules.wish(found), found, seen) is met


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("", DeviceState.ACTIVE),
        ("BOARD_UNREACHABLE", DeviceState.ACTIVE),
        ("BOARD_AWAY", DeviceState.ACTIVE),
        ("LINE_BUSY", DeviceState.ERROR),
        ("HARDWARE_MISSING", DeviceState.ERROR),
        ("PERMISSION_DENIED", DeviceState.ERROR),
    ],
)
def test_a_board_that_is_away_says_nothing_about_its_pins(reason: str, state: DeviceState) -> None:
    assert rules.settled(OUTPUT, GpioStatus(reason=reason)).state is state
    off = changed(OUTPUT, enabled=False)
    assert rules.settled(off, GpioStatus(reason=reason)).state is DeviceState.INACTIVE


@pytest.mark.parametrize(
    ("found", "value", "error"),
    [
        (device(INPUT), 1, FailedPrecondition),
        (device(changed(OUTPUT, enabled=False)), 1, FailedPrecondition),
        (device(changed(OUTPUT, device_type=DeviceType.ANALOG)), 1, FailedPrecondition),
        (device(OUTPUT), 2, InvalidArgument),
        (device(OUTPUT), -1, InvalidArgument),
        (device(PWM), 101, InvalidArgument),
        (device(changed(PWM, config=GpioConfig())), 50, FailedPrecondition),
        (device(OUTPUT, GpioStatus(lease=PinHold(id="l", holder="robot", taken_at_ns=0))), 1, Conflict),
    ],
)
def test_what_may_not_be_written(found: Device, value: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        rules.check_writable(found, value, "someone", now_ns=0)


def test_an_expired_lease_keeps_nobody_out() -> None:
    lease = PinHold(id="l", holder="robot", taken_at_ns=0, expires_at_ns=100)
    leased = device(OUTPUT, GpioStatus(lease=lease))

    with pytest.raises(Conflict):
        rules.check_writable(leased, 1, "someone", now_ns=99)
    rules.check_writable(leased, 1, "someone", now_ns=100)
    rules.check_writable(leased, 1, "robot", now_ns=99)


def test_the_same_holder_renews_and_a_lease_without_an_end_is_another_one() -> None:
    first = rules.taken(None, "robot", seconds=10, fresh_id="a", now_ns=0)
    renewed = rules.taken(first, "robot", seconds=10, fresh_id="b", now_ns=5 * NS)
    endless = rules.taken(renewed, "robot", seconds=None, fresh_id="c", now_ns=6 * NS)
    late = rules.taken(first, "robot", seconds=10, fresh_id="d", now_ns=11 * NS)

    assert (renewed.id, renewed.expires_at_ns) == ("a", 15 * NS)
    assert (endless.id, endless.expires_at_ns) == ("c", None)
    assert late.id == "d", "what was over is not renewed"


@pytest.mark.parametrize("seconds", [0, -1, 86_401, float("nan")])
def test_a_lease_has_a_length_that_makes_sense(seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        rules.taken(None, "robot", seconds=seconds, fresh_id="a", now_ns=0)


@given(
    level=st.sampled_from([None, 0, 1]),
    lease_id=st.sampled_from(["", "mine", "other"]),
    held=st.booleans(),
)
def test_after_a_lease_has_ended_nothing_written_under_it_is_wanted(
    level: int | None, lease_id: str, held: bool
) -> None:
    lease = PinHold(id="mine", holder="robot", taken_at_ns=0, expires_at_ns=1)
    spec, status = changed(OUTPUT, level=level, lease_id=lease_id), GpioStatus(held=held, lease=lease)

    after_spec, after = rules.lease_ended(spec, status, lease)

    assert after.lease is None
    if lease_id == "mine":
        assert after_spec.level is None
        assert after.owed_lease_id == "mine"
    else:
        assert after_spec == spec
        assert after.owed_lease_id == ""


def test_protected_pins_are_used_only_where_that_is_set() -> None:
    protected = changed(INPUT, pin=2)

    with pytest.raises(PermissionDenied) as error:
        rules.checked(protected)
    assert error.value.details["cause"] == "protected"
    assert rules.checked(protected, unprotected=frozenset({2})) == protected
