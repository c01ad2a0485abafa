from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.boards.board_node_rig import NodeRig, configured, node_rig
from support.boards.boards_rig import BoardsRig, boards_rig
from support.boards.gpio_rigs import (
    DoubleRig,
    GpioRig,
    SimulatedRig,
    kernel_simulator,
    why_no_kernel_simulator,
)
from support.boards.node_calls import COMMANDS


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


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path) as made:
        yield made


@pytest.fixture
async def rig(tmp_path: Path, server: BoardsRig) -> AsyncIterator[NodeRig]:
    """A member of the server's fleet that runs what tests want to have run."""
    async with node_rig(tmp_path, server, config=configured(commands=COMMANDS)) as made:
        yield made


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """A number of seconds to sleep that nobody else sleeps."""
    return f"97.{abs(hash(str(tmp_path))) % 10**9:09d}"
