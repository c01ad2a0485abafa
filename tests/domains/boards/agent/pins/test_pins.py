"""Pins for the event loop: rules, leases and safe states on simulated wires and simulated time."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from fleetplane.domains.boards.agent.gpio.chip import (
    HIGH,
    LOW,
    ChipMissing,
    LeasedByAnother,
    LineBusy,
    LineDirection,
    LineIsInput,
    LinePull,
)
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.pins.lines import REOPEN_SECONDS, AuditEntry
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinOperation, PinPolicy, PinRule, SafeState
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from fleetplane.sim.clock import VirtualClock

PIN = 17
ANN = PinCaller(user="ann")
LEASING = PinCaller(user="ann", lease_id="a1", lease_seconds=30.0)
BOB = PinCaller(user="bob")


class Lab:
    def __init__(self, policy: PinPolicy) -> None:
        self.board = SimulatedBoard()
        self.clock = VirtualClock()
        self.audit: list[AuditEntry] = []
        self.pins = Pins(self.board.open, policy, self.clock, audit=self.audit.append)

    @property
    def events(self) -> list[str]:
        return [entry.event for entry in self.audit]

    def level(self, pin: int = PIN) -> int:
        return self.board.wires[pin].level()

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"never came true; audit: {self.events}"
            await asyncio.sleep(0.001)


@asynccontextmanager
async def laboratory(policy: PinPolicy | None = None) -> AsyncIterator[Lab]:
    lab = Lab(policy or PinPolicy())
    async with lab.pins:
        running = asyncio.create_task(lab.pins.run())
        await lab.pins.list()  # by now `run` waits, and has to be woken for the first lease
        yield lab
        running.cancel()


def safe(state: SafeState, *, on_loss: bool = False, dwell: float = 0.0) -> PinPolicy:
    return PinPolicy(rules={PIN: PinRule(safe_state=state, safe_on_loss=on_loss, dwell_seconds=dwell)})


async def test_an_output_is_configured_written_and_read() -> None:
    async with laboratory() as lab:
        state = await lab.pins.configure(PIN, direction=LineDirection.OUTPUT, pull=LinePull.UP, caller=ANN)
        assert (state.direction, state.pull, state.level) == (LineDirection.OUTPUT, LinePull.UP, LOW)
        written = await lab.pins.write(PIN, HIGH, caller=ANN)
        assert (written.pin, written.level, written.at_ns) == (PIN, HIGH, lab.clock.now_ns())
        assert (await lab.pins.read(PIN, caller=BOB)).level == HIGH
        assert lab.level() == HIGH
    assert lab.events[:4] == ["pin_access_granted", "pin_configured", "pin_write", "pin_read"]
    assert [entry.user for entry in lab.audit[:4]] == ["ann", "ann", "ann", "bob"]


async def test_the_list_shows_present_levels_not_remembered_ones() -> None:
    async with laboratory() as lab:
        await lab.pins.configure(PIN, caller=ANN)
        await lab.pins.configure(4, direction=LineDirection.OUTPUT, level=HIGH, caller=ANN)
        assert [(state.pin, state.level) for state in await lab.pins.list()] == [(4, HIGH), (PIN, LOW)]
        lab.board.drive(PIN, HIGH)
        assert [(state.pin, state.level) for state in await lab.pins.list()] == [(4, HIGH), (PIN, HIGH)]


async def test_claiming_by_a_write_drives_the_level_without_a_glitch() -> None:
    async with laboratory() as lab:
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        assert list(lab.board.wires[PIN].history) == [HIGH]
        assert lab.board.wires[PIN].consumer == "fleetplane"


async def test_a_pin_that_is_not_configured_is_neither_read_nor_written_unless_claimed() -> None:
    async with laboratory() as lab:
        for call in (lab.pins.read(PIN, caller=ANN), lab.pins.write(PIN, HIGH, caller=ANN)):
            with pytest.raises(FailedPrecondition) as caught:
                await call
            assert caught.value.details["cause"] == "unconfigured"
        assert lab.events == ["pin_read_failed", "pin_write_failed"]
        lab.board.drive(PIN, HIGH)
        assert (await lab.pins.read(PIN, caller=ANN, claim=True)).level == HIGH


async def test_an_input_is_not_written_even_by_a_claiming_write() -> None:
    async with laboratory() as lab:
        await lab.pins.configure(PIN, caller=ANN)
        for claim in (False, True):
            with pytest.raises(LineIsInput):
                await lab.pins.write(PIN, HIGH, caller=ANN, claim=claim)
        assert lab.events[-1] == "write_to_input_pin"


async def test_configuring_an_output_again_does_not_move_it() -> None:
    async with laboratory() as lab:
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        state = await lab.pins.configure(PIN, direction=LineDirection.OUTPUT, pull=LinePull.DOWN, caller=ANN)
        assert state.level == HIGH
        assert list(lab.board.wires[PIN].history) == [HIGH]


@pytest.mark.parametrize("pin", [0, 1, 2, 3, 14, 15])
async def test_no_call_reaches_a_protected_pin(pin: int) -> None:
    async with laboratory() as lab:
        pins = lab.pins
        for call in (
            pins.configure(pin, caller=ANN),
            pins.read(pin, caller=ANN, claim=True),
            pins.write(pin, HIGH, caller=ANN, claim=True),
            pins.pwm(pin, frequency_hz=100, duty_percent=50, caller=ANN),
            pins.lease(pin, caller=LEASING),
            pins.release(pin, caller=ANN),
            pins.rehearse(PinOperation.WRITE, pin, caller=ANN),
        ):
            with pytest.raises(PermissionDenied) as caught:
                await call
            assert caught.value.details["cause"] == "protected"
        assert lab.events == ["critical_pin_access_denied"] * 7
        assert lab.board.wires[pin].consumer is None
        assert not lab.board.wires[pin].history


async def test_a_busy_line_names_its_holder_and_is_usable_once_free() -> None:
    async with laboratory() as lab:
        lab.board.occupy(PIN, "spi0 CS1")
        with pytest.raises(LineBusy, match="spi0 CS1"):
            await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        assert lab.audit[-1].event == "pin_write_failed"
        assert lab.audit[-1].details["cause"] == "busy"
        lab.board.occupy(PIN, None)
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)


async def test_a_missing_chip_is_said_and_found_when_it_comes() -> None:
    lab = Lab(PinPolicy())
    lab.board.unplug()
    async with lab.pins:
        assert not lab.pins.available
        assert "No such device" in lab.pins.unavailable_reason
        with pytest.raises(ChipMissing):
            await lab.pins.configure(PIN, caller=ANN)
        lab.board.plug()
        with pytest.raises(ChipMissing):
            await lab.pins.configure(PIN, caller=ANN)  # not looked for again yet
        await lab.clock.advance(REOPEN_SECONDS)
        await lab.pins.configure(PIN, caller=ANN)
        assert lab.pins.available
        assert lab.pins.unavailable_reason == ""


async def test_a_chip_that_goes_away_takes_its_pins_along_and_may_come_back() -> None:
    async with laboratory() as lab:
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        lab.board.unplug()
        (state,) = await lab.pins.list()
        assert state.level is None
        assert "No such device" in state.error
        assert not lab.pins.available
        assert await lab.pins.list() == ()
        lab.board.plug()
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        assert lab.level() == HIGH


async def test_a_call_that_finds_the_chip_gone_gives_up_on_it_and_the_next_looks_anew() -> None:
    async with laboratory() as lab:
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        lab.board.unplug()
        with pytest.raises(ChipMissing):
            await lab.pins.read(PIN, caller=ANN)
        assert not lab.pins.available
        assert lab.audit[-1].event == "pin_read_failed"
        lab.board.plug()
        with pytest.raises(FailedPrecondition):
            await lab.pins.read(PIN, caller=ANN)  # the claim went with the chip
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        assert lab.pins.available


async def test_the_system_refusing_access_is_told_from_a_protected_pin() -> None:
    async with laboratory() as lab:
        lab.board.fail(PIN, errno.EACCES)
        with pytest.raises(PermissionDenied) as caught:
            await lab.pins.configure(PIN, caller=ANN)
        assert caught.value.details["cause"] == "os"
        assert lab.audit[-1].event == "pin_configure_failed"


async def test_one_pin_that_fails_does_not_hide_the_others_from_the_list() -> None:
    async with laboratory() as lab:
        for pin in (4, 5):
            await lab.pins.configure(pin, caller=ANN)
        lab.board.fail(4)
        broken, well = await lab.pins.list()
        assert (broken.level, bool(broken.error)) == (None, True)
        assert (well.level, well.error) == (LOW, "")
        assert lab.pins.available


async def test_under_a_lease_there_is_one_writer_and_any_number_of_readers() -> None:
    async with laboratory() as lab:
        await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        for call in (
            lab.pins.write(PIN, LOW, caller=BOB),
            lab.pins.configure(PIN, caller=BOB),
            lab.pins.pwm(PIN, frequency_hz=10, duty_percent=50, caller=BOB),
            lab.pins.release(PIN, caller=BOB),
            lab.pins.end_lease(PIN, caller=BOB),
            lab.pins.rehearse(PinOperation.WRITE, PIN, caller=BOB),
        ):
            with pytest.raises(LeasedByAnother):
                await call
        assert (await lab.pins.read(PIN, caller=BOB)).level == HIGH
        (state,) = await lab.pins.list()
        assert state.lease is not None
        assert (state.lease.holder, state.lease.seconds_left) == ("ann", 30.0)
        assert "a1" not in repr(state)


@pytest.mark.parametrize(
    ("state", "level", "still_ours"),
    [
        (SafeState.INPUT, LOW, False),
        (SafeState.LOW, LOW, True),
        (SafeState.HIGH, HIGH, True),
        (SafeState.KEEP, HIGH, True),
    ],
)
async def test_a_pin_is_made_safe_the_moment_its_lease_runs_out(
    state: SafeState, level: int, still_ours: bool
) -> None:
    async with laboratory(safe(state)) as lab:
        await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        await lab.clock.advance(29.9)
        await lab.pins.list()
        assert "lease_expired" not in lab.events
        await lab.clock.advance(0.1)
        await lab.until(lambda: "safe_state_applied" in lab.events)
        assert lab.level() == level
        assert (lab.board.wires[PIN].consumer is not None) == still_ours
        entry = lab.audit[-1]
        assert (entry.user, entry.details["state"]) == ("agent", state)
        await lab.pins.write(PIN, HIGH, caller=BOB, claim=True)


async def test_every_change_under_a_lease_extends_it() -> None:
    async with laboratory(safe(SafeState.LOW)) as lab:
        await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        for _ in range(4):
            await lab.clock.advance(20)
            await lab.pins.write(PIN, HIGH, caller=LEASING)
        assert lab.level() == HIGH
        assert lab.events.count("lease_granted") == 1
        await lab.clock.advance(30)
        await lab.until(lambda: lab.level() == LOW)


async def test_an_expired_lease_is_over_even_before_anyone_was_woken() -> None:
    lab = Lab(safe(SafeState.LOW))
    async with lab.pins:  # nobody runs `run`
        await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        await lab.clock.advance(30)
        await lab.pins.read(PIN, caller=BOB)
        assert lab.level() == LOW


async def test_a_lease_can_be_taken_ahead_and_given_back() -> None:
    async with laboratory(safe(SafeState.LOW)) as lab:
        assert (await lab.pins.lease(PIN, caller=LEASING)).seconds_left == 30.0
        with pytest.raises(LeasedByAnother):
            await lab.pins.write(PIN, HIGH, caller=BOB, claim=True)
        await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        await lab.pins.end_lease(PIN, caller=LEASING)
        assert lab.level() == LOW
        await lab.pins.write(PIN, HIGH, caller=BOB)
        with pytest.raises(InvalidArgument):
            await lab.pins.lease(PIN, caller=ANN)


async def test_a_call_that_fails_leaves_no_lease() -> None:
    async with laboratory() as lab:
        lab.board.occupy(PIN, "other")
        with pytest.raises(LineBusy):
            await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        lab.board.occupy(PIN, None)
        await lab.pins.write(PIN, HIGH, caller=BOB, claim=True)


@pytest.mark.parametrize(("on_loss", "level"), [(True, LOW), (False, HIGH)])
async def test_loss_of_the_control_plane_makes_safe_what_is_configured_so(on_loss: bool, level: int) -> None:
    async with laboratory(safe(SafeState.LOW, on_loss=on_loss)) as lab:
        await lab.pins.write(PIN, HIGH, caller=LEASING, claim=True)
        await lab.pins.write(4, HIGH, caller=ANN, claim=True)
        await lab.pins.control_lost()
        assert lab.level() == level
        assert lab.level(4) == HIGH


async def test_leaving_makes_every_pin_safe_and_gives_it_up() -> None:
    policy = PinPolicy(rules={PIN: PinRule(safe_state=SafeState.HIGH), 4: PinRule(safe_state=SafeState.LOW)})
    async with laboratory(policy) as lab:
        await lab.pins.write(PIN, LOW, caller=ANN, claim=True)
        await lab.pins.write(4, HIGH, caller=ANN, claim=True)
        await lab.pins.pwm(5, frequency_hz=50, duty_percent=50, caller=ANN)
        before = {pin: len(lab.board.wires[pin].history) for pin in (PIN, 4)}
    assert list(lab.board.wires[PIN].history)[before[PIN] :][0] == HIGH
    assert list(lab.board.wires[4].history)[before[4] :][0] == LOW
    assert all(wire.consumer is None for wire in lab.board.wires)
    assert lab.events.count("safe_state_applied") == 3
    with pytest.raises(Unavailable):
        await lab.pins.read(PIN, caller=ANN)


async def test_one_pin_that_cannot_be_made_safe_does_not_keep_the_others_from_it() -> None:
    policy = PinPolicy(default_rule=PinRule(safe_state=SafeState.LOW))
    async with laboratory(policy) as lab:
        for pin in (4, 5, 6):
            await lab.pins.write(pin, HIGH, caller=ANN, claim=True)
        lab.board.fail(5)
        await lab.pins.list()
    assert [lab.level(pin) for pin in (4, 6)] == [LOW, LOW]
    assert lab.events.count("safe_state_failed") == 1


async def test_a_pin_with_a_dwell_time_changes_no_sooner_not_even_by_being_released() -> None:
    async with laboratory(safe(SafeState.KEEP, dwell=2.0)) as lab:
        await lab.pins.configure(PIN, direction=LineDirection.OUTPUT, caller=ANN)
        await lab.pins.write(PIN, HIGH, caller=ANN)  # configuring changed nothing
        await lab.pins.write(PIN, HIGH, caller=ANN)  # nor does this
        with pytest.raises(ResourceExhausted) as caught:
            await lab.pins.write(PIN, LOW, caller=ANN)
        assert caught.value.retry_after_seconds == 2.0
        await lab.pins.release(PIN, caller=ANN)
        with pytest.raises(ResourceExhausted):
            await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        with pytest.raises(ResourceExhausted):
            await lab.pins.configure(PIN, direction=LineDirection.OUTPUT, level=HIGH, caller=ANN)
        assert lab.events[-1] == "dwell_time_denied"
        await lab.clock.advance(2.0)
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        with pytest.raises(FailedPrecondition):
            await lab.pins.pwm(PIN, frequency_hz=1, duty_percent=50, caller=ANN)


async def test_safety_does_not_wait_for_the_dwell_time() -> None:
    async with laboratory(safe(SafeState.LOW, dwell=3600.0, on_loss=True)) as lab:
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        await lab.pins.control_lost()
        assert lab.level() == LOW


async def test_releasing_is_harmless_for_a_pin_that_was_never_ours() -> None:
    async with laboratory() as lab:
        await lab.pins.release(PIN, caller=ANN)
        await lab.pins.write(PIN, HIGH, caller=ANN, claim=True)
        await lab.pins.release(PIN, caller=ANN)
        assert await lab.pins.list() == ()
        assert lab.board.wires[PIN].consumer is None


async def test_a_rehearsal_touches_nothing() -> None:
    async with laboratory() as lab:
        await lab.pins.rehearse(PinOperation.WRITE, PIN, caller=LEASING)
        assert lab.board.wires[PIN].consumer is None
        assert await lab.pins.list() == ()
        await lab.pins.write(PIN, HIGH, caller=BOB, claim=True)


@pytest.mark.parametrize("level", [-1, 2])
async def test_a_level_that_is_none_changes_nothing(level: int) -> None:
    async with laboratory() as lab:
        with pytest.raises(InvalidArgument):
            await lab.pins.write(PIN, level, caller=ANN, claim=True)
        with pytest.raises(InvalidArgument):
            await lab.pins.configure(PIN, direction=LineDirection.OUTPUT, level=level, caller=ANN)
        assert lab.board.wires[PIN].consumer is None


async def test_a_thousand_calls_at_once_exhaust_nothing() -> None:
    async with laboratory() as lab:
        await lab.pins.configure(PIN, direction=LineDirection.OUTPUT, caller=ANN)
        await asyncio.gather(*(lab.pins.write(PIN, count % 2, caller=ANN) for count in range(1000)))
        for _ in range(1000):
            await lab.pins.read(PIN, caller=ANN)
        refused = [
            await asyncio.gather(lab.pins.write(0, HIGH, caller=ANN), return_exceptions=True)
            for _ in range(100)
        ]
        assert all(isinstance(outcome, PermissionDenied) for (outcome,) in refused)
        await lab.pins.write(PIN, HIGH, caller=ANN)
        assert lab.events.count("pin_write") == 1001
        assert lab.events.count("pin_read") == 1000


async def test_every_call_leaves_an_entry_before_it_returns() -> None:
    async with laboratory() as lab:
        for operation in range(20):
            before = len(lab.audit)
            try:
                await lab.pins.write(operation, HIGH, caller=ANN, claim=operation % 2 == 0)
            except FleetplaneError as error:
                assert lab.audit[-1].message == error.message
            assert len(lab.audit) > before
