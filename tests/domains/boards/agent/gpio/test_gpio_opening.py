"""Which driver stands behind the pins."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.domains.boards.agent.gpio import drivers as opening
from fleetplane.domains.boards.agent.gpio.chip import HIGH, ChipMissing, LineDirection, LinePull
from fleetplane.domains.boards.agent.gpio.drivers import GpioDriver, chip_factory


def test_simulated_wires_outlive_the_chip_that_was_opened_on_them() -> None:
    factory = chip_factory(GpioDriver.SIMULATED)
    chip = factory()
    chip.claim(4, direction=LineDirection.OUTPUT, pull=LinePull.UP, level=HIGH, consumer="first")
    again = factory()
    assert again.holder(4) == "first"
    chip.close()
    assert again.holder(4) is None


def test_on_a_machine_without_chips_the_real_driver_says_so() -> None:
    if list(Path("/dev").glob("gpiochip*")):
        pytest.skip("this machine has GPIO chips")
    with pytest.raises(ChipMissing, match="no chips at all"):
        chip_factory(GpioDriver.GPIOD)()


def test_a_library_that_is_not_installed_is_a_missing_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "LIBRARY", "gpiod_that_nobody_installed")
    with pytest.raises(ChipMissing, match="cannot be loaded") as caught:
        chip_factory(GpioDriver.GPIOD)()
    assert "pip install" in caught.value.advice
