"""Which driver stands behind the pins. Drivers are loaded when they are asked for: a simulated board
needs no library, and a library that is missing is a fact about the pins, not the end of the agent."""

from __future__ import annotations

import importlib
from enum import StrEnum

from fleetplane.domains.boards.agent.gpio.chip import Chip, ChipFactory
from fleetplane.domains.boards.agent.gpio.errors import ChipMissing
from fleetplane.domains.boards.agent.gpio.simulated import SimulatedBoard

LIBRARY = "gpiod"


class GpioDriver(StrEnum):
    GPIOD = "gpiod"
    SIMULATED = "simulated"


def chip_factory(driver: GpioDriver) -> ChipFactory:
    """A simulated board keeps its wires as long as its factory lives, as copper would."""
    match driver:
        case GpioDriver.GPIOD:
            return open_gpiod
        case GpioDriver.SIMULATED:
            return SimulatedBoard().open


def open_gpiod() -> Chip:
    try:
        importlib.import_module(LIBRARY)
    except ImportError as error:
        raise ChipMissing(
            f"the Python package {LIBRARY} cannot be loaded: {error}", hint="pip install 'gpiod>=2.0.2'"
        ) from error
    from fleetplane.domains.boards.agent.gpio.gpiod_chip import open_header_chip

    return open_header_chip()
