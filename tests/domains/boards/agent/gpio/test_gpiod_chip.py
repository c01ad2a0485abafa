"""What is particular to the kernel's chips: finding the right one, and its errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from support.boards.gpio_rigs import KernelDouble, os_error

from fleetplane.domains.boards.agent.gpio.chip import (
    HIGH,
    LOW,
    AccessRefused,
    ChipMissing,
    HardwareFault,
    LineDirection,
    LinePull,
)
from fleetplane.domains.boards.agent.gpio.drivers import SimulatedBoard
from fleetplane.domains.boards.agent.gpio.gpiod_chip import GpiodChip, device_paths, open_header_chip

Opener = Callable[[str], KernelDouble]


def opener(chips: dict[str, KernelDouble | int]) -> Opener:
    def open_chip(path: str) -> KernelDouble:
        chip = chips[path]
        if isinstance(chip, int):
            raise os_error(chip)
        return chip

    return open_chip


def find(**chips: KernelDouble | int) -> GpiodChip:
    return open_header_chip(lambda: list(chips), open_chip=opener(chips))


def chip(label: str, lines: int = 54, names: tuple[str, ...] = ()) -> KernelDouble:
    return KernelDouble(SimulatedBoard(lines), label, names)


def test_the_chip_is_found_by_its_label_wherever_it_is_numbered() -> None:
    expander, header, power = (
        chip("raspberrypi-exp-gpio", 8),
        chip("pinctrl-bcm2711", 58),
        chip("fe000000.gpio"),
    )
    for order in ((expander, header, power), (header, power, expander), (power, expander, header)):
        for double in order:
            double.closed = False
        found = find(**{f"c{number}": double for number, double in enumerate(order)})
        assert found.label == "pinctrl-bcm2711"
        assert found.lines == 58
        assert [double.closed for double in (expander, header, power)] == [True, False, True]


def test_of_two_known_labels_the_one_with_the_header_wins() -> None:
    inner, header = chip("pinctrl-bcm2712"), chip("pinctrl-rp1")
    assert find(a=inner, b=header).label == "pinctrl-rp1"
    assert inner.closed
    assert not header.closed


def test_an_unknown_chip_is_recognised_by_the_names_of_its_lines() -> None:
    names = ("unused", "GPIO5", "GPIO4", "GPIO5")
    double = chip("new-silicon", len(names), names)
    found = find(a=chip("other", 4), b=double)
    assert found.label == "new-silicon"
    found.claim(4, direction=LineDirection.OUTPUT, pull=LinePull.NONE, level=HIGH, consumer="test")
    assert [wire.level() for wire in double.board.wires] == [LOW, LOW, HIGH, LOW]
    with pytest.raises(ChipMissing, match="GPIO3"):
        found.claim(3, direction=LineDirection.INPUT, pull=LinePull.NONE, consumer="test")


def test_a_known_label_is_preferred_to_names() -> None:
    named = chip("new-silicon", 2, ("GPIO0", "GPIO1"))
    assert find(a=named, b=chip("pinctrl-bcm2835")).label == "pinctrl-bcm2835"
    assert named.closed


def test_without_the_right_chip_the_error_says_what_there_is() -> None:
    with pytest.raises(ChipMissing, match="there are expander") as caught:
        find(a=chip("expander"))
    assert caught.value.details["cause"] == "missing"
    with pytest.raises(ChipMissing, match="no chips at all"):
        find()


def test_chips_that_may_not_be_opened_are_told_from_chips_that_are_not_there() -> None:
    with pytest.raises(AccessRefused, match="opening /dev/gpiochip0") as caught:
        open_header_chip(lambda: ["/dev/gpiochip0"], open_chip=opener({"/dev/gpiochip0": errno.EACCES}))
    assert caught.value.details == {"cause": "os", "errno": "EACCES", "path": "/dev/gpiochip0"}
    assert find(a=errno.EACCES, b=chip("pinctrl-rp1")).label == "pinctrl-rp1"


@pytest.mark.parametrize(
    ("number", "code", "cause"),
    [
        (errno.EBUSY, "FAILED_PRECONDITION", "busy"),
        (errno.EACCES, "PERMISSION_DENIED", "os"),
        (errno.EPERM, "PERMISSION_DENIED", "os"),
        (errno.ENODEV, "UNAVAILABLE", "missing"),
        (errno.ENOENT, "UNAVAILABLE", "missing"),
        (errno.EINVAL, "INVALID_ARGUMENT", "invalid"),
        (errno.EOPNOTSUPP, "UNIMPLEMENTED", "unsupported"),
        (524, "UNIMPLEMENTED", "unsupported"),
        (errno.EIO, "UNAVAILABLE", "io"),
        (errno.ETIMEDOUT, "UNAVAILABLE", "timeout"),
    ],
)
def test_the_kernels_errors_keep_their_meaning(number: int, code: str, cause: str) -> None:
    codes = {
        3: "INVALID_ARGUMENT",
        7: "PERMISSION_DENIED",
        9: "FAILED_PRECONDITION",
        12: "UNIMPLEMENTED",
        14: "UNAVAILABLE",
    }
    double = chip("pinctrl-rp1")
    found = find(a=double)
    line = found.claim(4, direction=LineDirection.OUTPUT, pull=LinePull.NONE, level=LOW, consumer="test")
    double.failure = number
    for call in (
        line.read,
        lambda: line.write(HIGH),
        lambda: line.reconfigure(direction=LineDirection.INPUT, pull=LinePull.NONE, level=LOW),
        lambda: found.claim(5, direction=LineDirection.INPUT, pull=LinePull.NONE, consumer="test"),
    ):
        with pytest.raises(HardwareFault) as caught:
            call()
        assert codes[caught.value.grpc_code] == code
        assert caught.value.details["cause"] == cause


def test_a_claim_that_fails_half_way_is_given_back() -> None:
    double = chip("pinctrl-rp1")
    found = find(a=double)
    request_lines = double.request_lines

    def then_fail(*arguments: object, **named: object) -> object:
        request = request_lines(*arguments, **named)  # type: ignore[arg-type]
        double.failure = errno.EIO
        return request

    double.request_lines = then_fail  # type: ignore[method-assign, assignment]
    with pytest.raises(HardwareFault):
        found.claim(4, direction=LineDirection.OUTPUT, pull=LinePull.NONE, consumer="test")
    assert double.board.wires[4].consumer is None


def test_files_that_merely_look_like_chips_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "gpiochip0").write_text("")
    assert device_paths(tmp_path) == []
