from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpio_rigs import DoubleRig, GpioRig, SimulatedRig, kernel_simulator, why_no_kernel_simulator


@pytest.fixture(params=["simulated", "gpiod-double", "gpio-sim"])
def gpio_rig(request: pytest.FixtureRequest) -> Iterator[GpioRig]:
    """The same wires behind each driver: all must keep one contract."""
    match request.param:
        case "simulated":
            yield SimulatedRig()
        case "gpiod-double":
            yield DoubleRig()
        case _:
            if reason := why_no_kernel_simulator():
                pytest.skip(reason)
            with kernel_simulator() as rig:
                yield rig
