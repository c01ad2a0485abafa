"""An agent that knows nothing but the contract's text: every message is put together by hand.

Generated code on both sides would agree about a wrong field number; this would not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from support.instances.agents_rig import BOSS, agents_rig, until

from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentResult, AgentVerb
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

STREAM = "/nxmesh.agent.v1.AgentService/Stream"
REPORT_HEALTH = "/nxmesh.agent.v1.AgentService/ReportHealth"


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = value >> 7, value & 0x7F
        out.append(low | (0x80 if value else 0))
        if not value:
            return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def chunk(field: int, value: str | bytes) -> bytes:
    body = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | 2) + varint(len(body)) + body


def entry(field: int, key: str, value: str) -> bytes:
    return chunk(field, chunk(1, key) + chunk(2, value))


def fields(body: bytes) -> Iterator[tuple[int, Any]]:
    at = 0

    def read() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = body[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(body):
        tag = read()
        if tag & 7 == 0:
            yield tag >> 3, read()
        else:
            assert tag & 7 == 2
            size = read()
            yield tag >> 3, body[at : at + size]
            at += size


class Agent:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = channel.stream_stream(STREAM)()  # no codecs: bytes in, bytes out

    async def say(self, field: int, payload: bytes) -> None:
        await self.call.write(number(2, 1_900_000_000_000) + chunk(field, payload))

    async def hear(self, field: int) -> dict[int, Any]:
        """The next message of this field, by its fields; of repeated ones the last."""
        async with asyncio.timeout(60):
            while True:
                message = dict(fields(await self.call.read()))
                if field in message:
                    return dict(fields(message[field]))


async def test_a_client_written_from_the_contract_alone_goes_through_a_session(tmp_path: Path) -> None:
    async with agents_rig(tmp_path) as rig:
        host = await rig.host("example.com")
        enrolled = await rig.enrol("web-01")
        credentials = grpc.ssl_channel_credentials(rig.root)
        async with grpc.aio.secure_channel(rig.address, credentials) as channel:
            agent = Agent(channel)
            registration = (
                chunk(1, enrolled.token)
                + chunk(2, "web-01.internal")
                + chunk(3, "10.0.1.10")
                + chunk(4, "0.1.0")
                + chunk(5, "http2")
                + chunk(5, "websocket")
                + entry(6, "region", "us-east-1")
                + number(7, 2)
            )
            await agent.say(3, registration)
            welcome = await agent.hear(2)
            assert (welcome[1].decode(), welcome[2], welcome[4]) == (enrolled.agent.name, 1, 30)
            status = rig.stored(enrolled.agent.name).status
            assert status is not None
            assert (status.deployment_mode, status.capabilities) == (
                "kubernetes_sidecar",
                ("http2", "websocket"),
            )

            nginx = number(1, 1) + number(2, 77) + number(3, 60) + number(4, 42)
            await agent.say(4, chunk(1, nginx))
            update = await agent.hear(3)
            served = dict(fields(update[3]))
            assert (served[1].decode(), served[3], served[4]) == (host.name, b"example.com", 80)
            assert dict(fields(served[9]))[2] == b"http://127.0.0.1:9000"
            for state in (1, 2, 3, 4):
                await agent.say(5, chunk(1, update[1]) + number(2, update[2]) + number(3, state))
                ack = await agent.hear(5)
                assert (
                    ack[1].decode() == f"{update[1].decode()}:{update[2]}:{pb.ConfigApplyStatus.Name(state)}"
                )
            await until(lambda: rig.deployment_states(enrolled.agent.name) == {update[2]: "success"})

            order = AgentOrder(verb=AgentVerb.STOP, timeout_seconds=9)
            asked = asyncio.create_task(
                rig.side.commander.order(rig.stored(enrolled.agent.name), order, actor=BOSS)
            )
            command = await agent.hear(4)
            assert dict(fields(command[4])) == {1: 1, 2: 9}
            said = entry(4, "command_id", command[1].decode()) + entry(4, "success", "true")
            await agent.say(8, chunk(1, "e-1") + chunk(2, "command.result") + said)
            assert await asked == AgentResult(success=True, message="Nginx stopped successfully")

            report: Any = channel.unary_unary(REPORT_HEALTH)
            metadata = (("authorization", f"Bearer {enrolled.token}"),)
            answer = await report(chunk(1, nginx) + number(4, update[2]), metadata=metadata)
            assert dict(fields(answer)) == {2: 1}


def test_the_contract_has_its_32_messages_4_enumerations_and_one_service() -> None:
    file = pb.DESCRIPTOR
    # Ours, in fields that others do not know.
    ours = {"Stream", "Observation", "ShowObservedCommand", "TakeOverCommand", "GiveBackCommand"}
    documented = set(file.message_types_by_name) - ours
    assert (len(documented), len(file.enum_types_by_name)) == (32, 4)
    (service,) = file.services_by_name.values()
    assert service.full_name == "nxmesh.agent.v1.AgentService"
    assert [method.name for method in service.methods] == ["Stream", "ReportHealth", "ReportMetrics"]
