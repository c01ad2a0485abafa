"""Numbers and nulls as the original clients, whose types are Go's, read and write them; compared as bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.boards.boards_rig import BOSS, BoardsRig, boards_rig
from support.boards.boards_web import BoardsWeb, boards_web

from fleetplane.domains.boards.pins.turns import PinTurn
from fleetplane.domains.boards.wire.message_json import plain
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.telemetry import Point

WHOLE_AS_REAL = re.compile(rb"\d\.0\b")


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[BoardsWeb]:
    async with boards_rig(tmp_path) as rig, boards_web(rig) as web:
        await web.post("/nodes", {"name": "one"})
        await web.post("/gpio", {"name": "lamp", "node_id": 1, "pin_number": 17, "direction": "output"})
        await written(rig, 1)
        yield web


async def written(rig: BoardsRig, level: int) -> None:
    devices = rig.domain.nodes.devices
    turn = PinTurn(device=devices.require(1))
    await devices.written(turn, level, lease_id="", at_ns=rig.kernel.clock.now_ns(), actor=BOSS)


async def test_a_pins_value_is_an_integer_in_json(web: BoardsWeb) -> None:
    for path in ("/gpio/1", "/gpio", "/nodes/1", "/nodes/1/gpio"):
        answer = await web.call("GET", path)
        assert b'"value":1,' in answer.content, path
        assert not WHOLE_AS_REAL.search(answer.content), answer.content


async def test_readings_and_figures_have_no_point_where_they_are_whole(web: BoardsWeb) -> None:
    telemetry, now_ns = web.rig.kernel.telemetry, web.rig.kernel.clock.now_ns()
    assert telemetry is not None
    telemetry.offer(points=[Point(scope="boards", series="gpio", source="1", at_ns=now_ns, value=1.0)])
    await telemetry.flush()
    answer = await web.call("GET", "/gpio/1/readings")
    assert b'"value":1,' in answer.content
    assert repr(plain(pb.SystemMetrics(cpu_usage=15.0))["cpu_usage"]) == "15"


async def test_null_leaves_a_field_alone_and_true_is_a_level(web: BoardsWeb) -> None:
    await web.post("/clusters", {"name": "home", "description": "d"})
    changed = await web.put(
        "/clusters/1", {"name": None, "description": "e", "version": None, "status": None}
    )
    assert (changed["name"], changed["description"]) == ("home", "e")
    node = await web.put("/nodes/1", {"name": "two", "cluster_id": None, "role": None, "memory": None})
    assert (node["data"]["name"], node["data"]["role"]) == ("two", "worker")
    pin = await web.put("/gpio/1", {"name": None, "description": "x", "config": None, "status": None})
    assert (pin["data"]["name"], pin["data"]["description"]) == ("lamp", "x")
    assert await web.refused("POST", "/gpio/1/write", {"value": True}) == 503, "understood; the board is away"
