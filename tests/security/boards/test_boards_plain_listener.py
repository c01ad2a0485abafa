"""The listener without TLS, where nobody can say who they are: what a stranger tries there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import structlog.testing
from support.boards.boards_rig import boards_rig

from fleetplane.domains.boards.core import BoardOptions
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc


async def test_boards_without_a_certificate_come_in_up_to_a_limit(tmp_path: Path) -> None:
    options = BoardOptions(plain=True, plain_boards=10)
    async with boards_rig(tmp_path, options=options) as rig:
        stub: Any = pi_controller_pb2_grpc.PiControllerServiceStub(await rig.plain_channel())

        async def register(number: int) -> grpc.StatusCode | None:
            request = pi.CreateNodeRequest(name=f"x{number}", mac_address=f"02:00:00:00:00:{number:02x}")
            try:
                await stub.CreateNode(request)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return None

        with structlog.testing.capture_logs() as logs:
            answers = await asyncio.gather(*(register(number) for number in range(40)))
        assert answers.count(None) == 10, "also when they come all at once"
        assert answers.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 30
        told = [entry["event"] for entry in logs if entry["event"].startswith("boards.plain_limit")]
        assert told.index("boards.plain_limit_near") < told.index("boards.plain_limit_hit")

        assert await register(answers.index(None)) is grpc.StatusCode.ALREADY_EXISTS, "a known one is known"
        await rig.join("pi", ip_address="10.0.0.1")  # with a token and a certificate: no limit
