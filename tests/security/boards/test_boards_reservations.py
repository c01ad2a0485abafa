"""A reservation covers every change of a pin, not only writes: what somebody else tries meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from support.boards.boards_rig import boards_rig
from support.boards.boards_web import BoardsWeb, boards_web

from fleetplane.gen.pi_controller import pi_controller_pb2 as pi

LAMP = {"name": "lamp", "node_id": 1, "pin_number": 17, "direction": "output"}


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[BoardsWeb]:
    async with boards_rig(tmp_path) as rig, boards_web(rig) as web:
        await web.post("/nodes", {"name": "one"})
        await web.post("/gpio", LAMP)
        await web.post("/gpio/1/reserve", {"client_id": "panel"}, status=200, token=ann(web))
        yield web


def ann(web: BoardsWeb) -> str:
    return web.token("operator", name="ann")


def bob(web: BoardsWeb, role: str = "admin") -> str:
    return web.token(role, name="bob")


async def test_nobody_else_changes_or_deletes_a_reserved_pin_over_rest(web: BoardsWeb) -> None:
    for change in (
        {"direction": "input"},
        {"pull_mode": "up"},
        {"status": "inactive"},
        {"device_type": "pwm"},
        {"config": {"frequency": 50}},
        {"name": "mine"},
    ):
        assert await web.refused("PUT", "/gpio/1", change, token=bob(web)) == 409, change
    assert await web.refused("DELETE", "/gpio/1", token=bob(web)) == 409
    assert (await web.get("/gpio/1"))["data"]["direction"] == "output"

    changed = await web.put("/gpio/1", {"pull_mode": "down"}, token=ann(web))
    assert changed["data"]["pull_mode"] == "down", "its holder may"


async def test_nobody_else_changes_or_deletes_a_reserved_pin_over_grpc(web: BoardsWeb) -> None:
    stub, metadata = await web.rig.operator()
    calls = (
        stub.UpdateGPIODevice(
            pi.UpdateGPIODeviceRequest(id=1, direction=pi.GPIO_DIRECTION_INPUT), metadata=metadata
        ),
        stub.DeleteGPIODevice(pi.DeleteGPIODeviceRequest(id=1), metadata=metadata),
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call
        assert refusal.value.code() is grpc.StatusCode.ABORTED, refusal.value.details()


async def test_only_an_administrator_ends_somebody_elses_reservation(web: BoardsWeb) -> None:
    assert await web.refused("POST", "/gpio/1/release", {}, token=bob(web, "operator")) == 403
    await web.post("/gpio/1/release", {}, status=200, token=bob(web))
    await web.put("/gpio/1", {"direction": "input"}, token=bob(web))
