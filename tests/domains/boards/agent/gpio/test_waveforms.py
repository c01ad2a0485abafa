"""Waveforms: the arithmetic, the thread, the board's own block, and which of them a pin gets."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetplane.domains.boards.agent.gpio import waveforms
from fleetplane.domains.boards.agent.gpio.chip import (
    HIGH,
    LOW,
    AccessRefused,
    GpioLine,
    HardwareFailed,
    HardwareOverloaded,
    HardwareUnsupported,
    LineBusy,
    LineDirection,
    LinePull,
)
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.gpio.sysfs_pwm import SysfsPwm
from fleetplane.domains.boards.agent.gpio.waveforms import SOFTWARE_PINS_LIMIT, SoftwarePwm, Waveform
from fleetplane.domains.boards.agent.pins.pins import Pins
from fleetplane.domains.boards.agent.pins.rules import PinCaller, PinPolicy, PinRule, SafeState
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.sim.clock import VirtualClock

ANN = PinCaller(user="ann")


@pytest.fixture(autouse=True)
def _threads_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waveforms, "JOIN_SECONDS", 60.0)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.001)


@given(
    frequency=st.integers(1, 1000),
    duty=st.integers(1, 99),
    start=st.floats(0, 1e8),
    cycles=st.floats(0, 1e4),
)
def test_levels_take_turns_and_last_their_share(
    frequency: int, duty: int, start: float, cycles: float
) -> None:
    wave = Waveform(frequency_hz=frequency, duty_percent=duty, start=start)
    now = start + cycles / frequency
    level, until = wave.at(now)
    assert until > now
    after, later = wave.at(until)
    assert after != level
    share = duty / 100 if after == HIGH else 1 - duty / 100
    assert later - until == pytest.approx(share / frequency, rel=0.02, abs=1e-7)


@pytest.mark.parametrize(("duty", "level"), [(0, LOW), (100, HIGH)])
def test_all_or_none_of_a_cycle_is_a_level(duty: int, level: int) -> None:
    assert Waveform(frequency_hz=5, duty_percent=duty, start=0).at(123.4) == (level, float("inf"))


def output(board: SimulatedBoard, pin: int = 17) -> GpioLine:
    return board.open().claim(
        pin, direction=LineDirection.OUTPUT, pull=LinePull.NONE, level=LOW, consumer="test"
    )


def test_a_thread_toggles_the_line_until_stopped_and_not_once_more() -> None:
    board, pwm = SimulatedBoard(), SoftwarePwm()
    history = board.wires[17].history
    pwm.start(output(board), frequency_hz=500, duty_percent=50)
    wait_for(lambda: len(history) > 20)
    pwm.stop(17)
    stopped_at = len(history)
    time.sleep(0.02)  # ten cycles in which nothing may happen
    assert len(history) == stopped_at
    pwm.close()


def test_a_waveform_that_breaks_tells_whoever_looks_next() -> None:
    board, pwm = SimulatedBoard(), SoftwarePwm()
    pwm.start(output(board), frequency_hz=1000, duty_percent=50)
    board.fail(17)

    def broken() -> bool:
        try:
            pwm.level(17)
        except HardwareFailed:
            return True
        return False

    wait_for(broken)
    pwm.close()


class Sysfs:
    """A tree like a board's, and the little that the kernel does when its files are written."""

    def __init__(self, root: Path, *, compatible: str, device: str, routed: dict[str, bytes]) -> None:
        self.root = root
        self.writes: list[tuple[str, str]] = []
        self.refusals = 0
        node = root / "sys/firmware/devicetree/base/soc/pwm"
        pins = root / "sys/firmware/devicetree/base/soc/gpio@7e200000/pwm_pins"
        platform = root / "sys/devices/platform/soc" / device
        self.chip = platform / "pwm/pwmchip2"
        for folder in (node, pins, self.chip, root / "sys/class/pwm"):
            folder.mkdir(parents=True)
        (node / "compatible").write_bytes(compatible.encode() + b"\0")
        (node / "pinctrl-0").write_bytes(struct.pack(">I", 77))
        (pins / "phandle").write_bytes(struct.pack(">I", 77))
        for name, value in routed.items():
            (pins / name).write_bytes(value)
        (platform / "of_node").symlink_to(node)
        (self.chip / "device").symlink_to(platform)
        (root / "sys/class/pwm/pwmchip2").symlink_to(self.chip)

    def write(self, path: Path, text: str) -> None:
        channel = self.chip.resolve() / f"pwm{text}"
        match path.name:
            case "export":
                channel.mkdir()
                for name in ("period", "duty_cycle", "enable"):
                    (channel / name).write_text("0")
            case "unexport":
                for file in channel.iterdir():
                    file.unlink()
                channel.rmdir()
            case name:
                if self.refusals:
                    self.refusals -= 1
                    raise PermissionError(13, "Permission denied")
                values = {file.name: int(file.read_text()) for file in path.parent.iterdir()} | {
                    name: int(text)
                }
                if values["duty_cycle"] > values["period"]:
                    raise OSError(22, "Invalid argument")
                path.write_text(text)
        self.writes.append((path.name, text))

    def channel(self, number: int) -> dict[str, int]:
        folder = self.chip.resolve() / f"pwm{number}"
        return {file.name: int(file.read_text()) for file in folder.iterdir()} if folder.exists() else {}

    def pwm(self, **settings: frozenset[int]) -> SysfsPwm:
        return SysfsPwm(self.root, write=self.write, sleep=lambda seconds: None, **settings)


@pytest.fixture
def fourth(tmp_path: Path) -> Sysfs:
    """A board of the fourth kind, with an overlay that routes pins 18 and 19."""
    return Sysfs(
        tmp_path,
        compatible="brcm,bcm2835-pwm",
        device="fe20c000.pwm",
        routed={"brcm,pins": struct.pack(">II", 18, 19)},
    )


def test_only_routed_pins_are_offered(fourth: Sysfs) -> None:
    pwm = fourth.pwm()
    assert [pin for pin in range(28) if pwm.offers(pin)] == [18, 19]


def test_the_fifth_board_names_its_pins_and_has_four_channels(tmp_path: Path) -> None:
    sysfs = Sysfs(
        tmp_path,
        compatible="raspberrypi,rp1-pwm",
        device="1f00098000.pwm",
        routed={"pins": b"gpio12\0gpio18\0"},
    )
    pwm = sysfs.pwm()
    assert [pin for pin in range(28) if pwm.offers(pin)] == [12, 18]
    pwm.start(18, frequency_hz=1000, duty_percent=50)
    assert sysfs.channel(2) == {"period": 1_000_000, "duty_cycle": 500_000, "enable": 1}


def test_another_block_of_the_same_make_is_not_the_headers(tmp_path: Path) -> None:
    sysfs = Sysfs(
        tmp_path,
        compatible="brcm,bcm2835-pwm",
        device="fe20c800.pwm",
        routed={"brcm,pins": struct.pack(">I", 18)},
    )
    assert not any(sysfs.pwm().offers(pin) for pin in range(28))


def test_without_a_block_nothing_is_offered(tmp_path: Path) -> None:
    pwm = SysfsPwm(tmp_path)
    assert not pwm.offers(18)
    with pytest.raises(HardwareUnsupported):
        pwm.start(18, frequency_hz=1000, duty_percent=50)


def test_the_operator_may_know_the_routing_better(fourth: Sysfs) -> None:
    pwm = fourth.pwm(pins=frozenset({12}))
    assert [pin for pin in range(28) if pwm.offers(pin)] == [12]


@pytest.mark.parametrize(
    "figures",
    [[(1000, 50), (40_000, 100), (1, 1), (1, 100), (40_000, 0)], [(1, 100), (40_000, 50), (100, 99)]],
)
def test_no_step_between_two_waveforms_has_more_duty_than_period(
    fourth: Sysfs, figures: list[tuple[int, int]]
) -> None:
    pwm = fourth.pwm()
    for frequency, duty in figures:
        pwm.start(18, frequency_hz=frequency, duty_percent=duty)
        period = 1_000_000_000 // frequency
        assert fourth.channel(0) == {"period": period, "duty_cycle": period * duty // 100, "enable": 1}


def test_stopping_gives_the_channel_back(fourth: Sysfs) -> None:
    pwm = fourth.pwm()
    pwm.start(18, frequency_hz=1000, duty_percent=50)
    pwm.start(19, frequency_hz=1000, duty_percent=50)
    pwm.stop(18)
    pwm.stop(18)
    assert fourth.writes[-2:] == [("enable", "0"), ("unexport", "0")]
    assert fourth.channel(1)["enable"] == 1
    pwm.close()
    assert fourth.channel(1) == {}


def test_two_pins_on_one_channel_do_not_disturb_each_other(fourth: Sysfs) -> None:
    pwm = fourth.pwm(pins=frozenset({12, 18}))
    pwm.start(12, frequency_hz=1000, duty_percent=50)
    with pytest.raises(LineBusy, match="shares its PWM channel with pin 12"):
        pwm.start(18, frequency_hz=50, duty_percent=5)
    assert fourth.channel(0)["period"] == 1_000_000


def test_a_channel_of_another_program_is_left_alone(fourth: Sysfs) -> None:
    fourth.write(fourth.chip / "export", "0")
    with pytest.raises(LineBusy):
        fourth.pwm().start(18, frequency_hz=50, duty_percent=5)


def test_files_that_are_handed_over_late_are_waited_for_and_not_for_ever(fourth: Sysfs) -> None:
    fourth.refusals = 5
    pwm = fourth.pwm()
    pwm.start(18, frequency_hz=1000, duty_percent=50)
    assert fourth.channel(0)["enable"] == 1
    fourth.refusals = 10_000
    with pytest.raises(AccessRefused):
        pwm.start(19, frequency_hz=1000, duty_percent=50)
    assert fourth.refusals > 9_000


def pins_with(board: SimulatedBoard, sysfs: Sysfs | None = None, rule: PinRule | None = None) -> Pins:
    policy = PinPolicy(default_rule=rule or PinRule())
    hardware = sysfs.pwm() if sysfs else None
    return Pins(board.open, policy, VirtualClock(), audit=lambda entry: None, hardware_pwm=hardware)


async def test_a_software_waveform_is_marked_and_ends_with_the_next_write() -> None:
    board = SimulatedBoard()
    async with pins_with(board) as pins:
        state = await pins.pwm(17, frequency_hz=1000, duty_percent=50, caller=ANN)
        assert state.pwm is not None
        assert state.pwm.software
        (listed,) = await pins.list()
        assert listed.pwm == state.pwm
        await pins.write(17, HIGH, caller=ANN)
        (listed,) = await pins.list()
        assert (listed.pwm, listed.level) == (None, HIGH)
        changes = len(board.wires[17].history)
        await asyncio.sleep(0.01)  # ten cycles of the waveform that is over
        assert len(board.wires[17].history) == changes


async def test_software_says_where_its_limits_are_and_claims_nothing_beyond_them() -> None:
    board = SimulatedBoard()
    async with pins_with(board) as pins:
        with pytest.raises(FailedPrecondition) as caught:
            await pins.pwm(17, frequency_hz=1001, duty_percent=50, caller=ANN)
        assert caught.value.details["cause"] == "software-limit"
        with pytest.raises(InvalidArgument):
            await pins.pwm(17, frequency_hz=40_001, duty_percent=50, caller=ANN)
        assert board.wires[17].consumer is None
        for pin in range(4, 4 + SOFTWARE_PINS_LIMIT):
            await pins.pwm(pin, frequency_hz=1, duty_percent=50, caller=ANN)
        with pytest.raises(HardwareOverloaded):
            await pins.pwm(20, frequency_hz=1, duty_percent=50, caller=ANN)
        assert board.wires[20].consumer is None
        await pins.release(4, caller=ANN)
        await pins.pwm(20, frequency_hz=1, duty_percent=50, caller=ANN)


async def test_a_routed_pin_gets_the_boards_block_and_is_never_claimed_as_a_line(fourth: Sysfs) -> None:
    board = SimulatedBoard()
    async with pins_with(board, fourth) as pins:
        state = await pins.pwm(18, frequency_hz=40_000, duty_percent=25, caller=ANN)
        assert state.pwm is not None
        assert not state.pwm.software
        with pytest.raises(FailedPrecondition) as caught:
            await pins.configure(18, caller=ANN)
        assert caught.value.details["cause"] == "pwm-routed"
        await pins.write(18, HIGH, caller=ANN)
        assert fourth.channel(0)["duty_cycle"] == fourth.channel(0)["period"]
        assert (await pins.read(18, caller=ANN)).level == HIGH
        assert board.wires[18].consumer is None
    assert fourth.channel(0) == {}


@pytest.mark.parametrize(("state", "last"), [(SafeState.LOW, "0"), (SafeState.HIGH, "1000000")])
async def test_a_block_is_made_safe_before_it_is_given_up(fourth: Sysfs, state: SafeState, last: str) -> None:
    async with pins_with(SimulatedBoard(), fourth, PinRule(safe_state=state)) as pins:
        await pins.pwm(18, frequency_hz=50, duty_percent=50, caller=ANN)
    duties = [value for name, value in fourth.writes if name == "duty_cycle"]
    assert duties[-1] == last
