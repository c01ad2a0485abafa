"""Pins through the server: an operator who asks, and a board whose wires can be looked at."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from support.boards.board_node_rig import NodeRig
from support.boards.boards_rig import BoardsRig, until

from fleetplane.domains.boards.access import OPERATOR
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.inventory.boards import status_of as board_status
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi

CODE = grpc.StatusCode
PIN = 17
BOSS = CallOrigin(actor="operator/boss", role=OPERATOR)


class Operator:
    """The original service, with an operator's token on each call."""

    def __init__(self, stub: Any, metadata: list[tuple[str, str]]) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda request, **more: method(request, metadata=self._metadata, **more)


async def operator(rig: BoardsRig, role: str = "boards.admin") -> Operator:
    return Operator(*await rig.operator(role))


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def number_of(node: NodeRig) -> int:
    assert node.membership is not None
    return node.membership.node_id


async def registered(rig: BoardsRig, board: int, node: NodeRig) -> None:
    """Until the server knows where this run of the agent listens."""
    await until(lambda: board_status(rig.board(board)).port == node.ports.agent_port)


async def device(admin: Operator, board: int, **said: Any) -> pi.GPIODevice:
    wanted = {"name": "lamp", "pin_number": PIN, "direction": pi.GPIO_DIRECTION_OUTPUT, **said}
    made: pi.GPIODevice = await admin.CreateGPIODevice(pi.CreateGPIODeviceRequest(node_id=board, **wanted))
    return made


def level(node: NodeRig, pin: int = PIN) -> int:
    return node.copper.wires[pin].level()
