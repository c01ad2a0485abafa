"""A server for boards, for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from support.boards.board_gpio_kit import number_of, registered
from support.boards.board_node_rig import NodeRig, node_rig
from support.boards.boards_processes import BoardProcess, Certified, Place, boards_place, config_of
from support.boards.boards_rig import BoardsRig, boards_rig
from support.boards.boards_web import BoardsWeb, boards_web


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[BoardsRig]:
    async with boards_rig(tmp_path) as made:
        yield made


@pytest.fixture
async def web(rig: BoardsRig) -> AsyncIterator[BoardsWeb]:
    async with boards_web(rig) as made:
        yield made


# A server and a board as processes of their own, for the tests of one module.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("boards")
    with boards_place(folder, "--set", "listeners.boards-plain.addresses=127.0.0.1:0") as made:
        yield made


@pytest.fixture(scope="module")
def board(place: Place) -> Iterator[BoardProcess]:
    plain = ("--plaintext-listen", "127.0.0.1:0")
    with place.board("one", config=config_of(place.folder), arguments=plain) as made:
        yield made


@pytest.fixture(scope="module")
def controller(place: Place) -> Certified:
    return place.certified("second-server")


@pytest.fixture
async def node(rig: BoardsRig, tmp_path: Path) -> AsyncIterator[NodeRig]:
    async with node_rig(tmp_path, rig) as made:
        await registered(rig, number_of(made), made)
        yield made
