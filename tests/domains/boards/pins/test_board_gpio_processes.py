"""Pins of real agents under a real server, each a process that can be killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.boards.boards_processes import BoardProcess, Place, boards_place, until
from support.shared.server_process import running_server

PIN = 17


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with boards_place(tmp_path_factory.mktemp("pins")) as made:
        yield made


def lamp(place: Place, board: BoardProcess) -> int:
    said = {"name": "lamp", "node_id": board.number, "pin_number": PIN, "direction": "output"}
    made: Any = place.did("POST", "/gpio", said)
    return int(made.get("data", made)["id"])


def level(place: Place, device: int) -> float | None:
    """As its board says now; None while it does not."""
    reply = place.ask("POST", f"/gpio/{device}/read")
    if reply.status != 200:
        return None
    found: Any = reply.json
    return float(found.get("data", found)["value"])


def test_a_killed_agents_pins_are_what_they_were_once_it_is_back(place: Place) -> None:
    with place.board("killed") as board:
        device = lamp(place, board)
        place.did("POST", f"/gpio/{device}/write", {"value": 1})
        assert level(place, device) == 1

        board.stop(signal.SIGKILL)
        assert place.ask("POST", f"/gpio/{device}/write", {"value": 0}).status == 503
        board.start()  # a board with nothing but low wires: its chip began anew with it

        until(lambda: level(place, device) == 1, "the pin is driven again")


def test_a_killed_servers_wishes_outlive_it(tmp_path: Path) -> None:
    with boards_place(tmp_path) as place, place.board("kept") as board:
        device = lamp(place, board)
        place.did("POST", f"/gpio/{device}/write", {"value": 1})
        board.stop()
        place.server.process.kill()
        place.server.process.wait(60)
    with running_server(place.data, "--only", "boards") as server:
        again = Place(server=server, data=place.data, folder=tmp_path, token=place.token)
        found: Any = again.did("GET", f"/gpio/{device}")
        assert found.get("data", found)["value"] == 1
