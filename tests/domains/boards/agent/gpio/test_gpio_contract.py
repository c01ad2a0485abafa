"""One contract, three drivers: simulated, libgpiod over a double, libgpiod over the kernel's simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.boards.gpio_rigs import LINES, GpioRig

from fleetplane.domains.boards.agent.gpio.chip import (
    HIGH,
    LOW,
    Chip,
    GpioLine,
    LineBusy,
    LineDirection,
    LineIsInput,
    LinePull,
    LineReleased,
)
from fleetplane.kernel.errors import InvalidArgument

PIN = 17


@pytest.fixture
def chip(gpio_rig: GpioRig) -> Iterator[Chip]:
    chip = gpio_rig.open()
    yield chip
    chip.close()


def claim(
    chip: Chip,
    direction: LineDirection = LineDirection.OUTPUT,
    *,
    pin: int = PIN,
    pull: LinePull = LinePull.NONE,
    level: int | None = None,
) -> GpioLine:
    return chip.claim(pin, direction=direction, pull=pull, level=level, consumer="contract")


def test_a_chip_says_what_it_is(chip: Chip) -> None:
    assert chip.label
    assert chip.lines == LINES


def test_an_output_shows_the_level_of_its_claim_at_once_and_no_other(gpio_rig: GpioRig, chip: Chip) -> None:
    line = claim(chip, level=HIGH)
    assert line.pin == PIN
    assert gpio_rig.level(PIN) == HIGH
    assert gpio_rig.history(PIN) in (None, [HIGH])


def test_an_output_without_a_level_goes_on_showing_what_it_shows(gpio_rig: GpioRig, chip: Chip) -> None:
    gpio_rig.drive(PIN, HIGH)
    claim(chip)
    assert gpio_rig.level(PIN) == HIGH
    assert gpio_rig.history(PIN) in (None, [HIGH])


def test_an_output_follows_what_is_written_and_can_be_read_back(gpio_rig: GpioRig, chip: Chip) -> None:
    line = claim(chip, level=LOW)
    for level in (HIGH, LOW, HIGH):
        line.write(level)
        assert gpio_rig.level(PIN) == level
        assert line.read() == level


def test_an_input_reads_what_the_outside_drives(gpio_rig: GpioRig, chip: Chip) -> None:
    line = claim(chip, LineDirection.INPUT)
    for level in (HIGH, LOW):
        gpio_rig.drive(PIN, level)
        assert line.read() == level


@pytest.mark.parametrize(("pull", "level"), [(LinePull.UP, HIGH), (LinePull.DOWN, LOW)])
def test_an_input_that_nobody_drives_reads_its_pull(chip: Chip, pull: LinePull, level: int) -> None:
    assert claim(chip, LineDirection.INPUT, pull=pull).read() == level


def test_an_input_is_not_written(chip: Chip) -> None:
    with pytest.raises(LineIsInput) as caught:
        claim(chip, LineDirection.INPUT).write(HIGH)
    assert caught.value.details["cause"] == "input"


def test_a_line_becomes_an_output_and_an_input_again_without_being_given_up(
    gpio_rig: GpioRig, chip: Chip
) -> None:
    gpio_rig.drive(PIN, LOW)
    line = claim(chip, LineDirection.INPUT)
    line.reconfigure(direction=LineDirection.OUTPUT, pull=LinePull.NONE, level=HIGH)
    assert gpio_rig.level(PIN) == HIGH
    line.reconfigure(direction=LineDirection.OUTPUT, pull=LinePull.NONE)
    assert gpio_rig.level(PIN) == HIGH
    line.reconfigure(direction=LineDirection.INPUT, pull=LinePull.NONE)
    assert line.read() == LOW
    assert chip.holder(PIN) == "contract"


def test_a_claim_is_exclusive_and_names_its_holder(gpio_rig: GpioRig, chip: Chip) -> None:
    claim(chip)
    assert chip.holder(PIN) == "contract"
    with pytest.raises(LineBusy) as caught:
        claim(chip)
    assert caught.value.details["cause"] == "busy"
    assert caught.value.details["consumer"] == "contract"


def test_a_line_that_another_program_holds_is_busy(gpio_rig: GpioRig, chip: Chip) -> None:
    gpio_rig.occupy(PIN, "another-program")
    assert chip.holder(PIN) == "another-program"
    with pytest.raises(LineBusy, match="another-program"):
        claim(chip)
    claim(chip, pin=PIN + 1)


def test_a_second_chip_object_does_not_get_what_the_first_holds(gpio_rig: GpioRig, chip: Chip) -> None:
    claim(chip)
    second = gpio_rig.open()
    with pytest.raises(LineBusy):
        claim(second)
    chip.close()
    claim(second)
    second.close()


def test_a_long_consumer_name_is_cut_to_what_the_kernel_keeps(chip: Chip) -> None:
    chip.claim(PIN, direction=LineDirection.INPUT, pull=LinePull.NONE, consumer="x" * 80)
    assert chip.holder(PIN) == "x" * 31


def test_a_released_line_is_free_and_answers_nothing(chip: Chip) -> None:
    line = claim(chip, level=LOW)
    line.release()
    line.release()
    assert chip.holder(PIN) is None
    for call in (
        line.read,
        lambda: line.write(HIGH),
        lambda: line.reconfigure(direction=LineDirection.INPUT, pull=LinePull.NONE),
    ):
        with pytest.raises(LineReleased):
            call()
    claim(chip)


def test_closing_releases_every_line_and_is_harmless_twice(gpio_rig: GpioRig) -> None:
    chip = gpio_rig.open()
    lines = [claim(chip, pin=pin) for pin in (4, 5)]
    chip.close()
    chip.close()
    with pytest.raises(LineReleased):
        lines[0].read()
    with pytest.raises(LineReleased):
        claim(chip)
    again = gpio_rig.open()
    assert [again.holder(pin) for pin in (4, 5)] == [None, None]
    again.close()


@pytest.mark.parametrize("pin", [-1, LINES, 99])
def test_a_pin_that_the_chip_does_not_have_is_refused(chip: Chip, pin: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        claim(chip, pin=pin)
    assert caught.value.field == "pin"


@pytest.mark.parametrize("level", [-1, 2])
def test_a_level_is_low_or_high(chip: Chip, level: int) -> None:
    with pytest.raises(InvalidArgument):
        claim(chip, level=level)
    assert chip.holder(PIN) is None
    line = claim(chip, level=LOW)
    with pytest.raises(InvalidArgument):
        line.write(level)
