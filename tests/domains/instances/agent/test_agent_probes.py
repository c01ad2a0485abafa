"""Whether the agent works, for whoever asks over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from domains.instances.agent.agent_rig import Rig
from instance_server_double import InstanceServerDouble, until

from fleetplane.domains.instances.agent import probes
from fleetplane.domains.instances.agent.probes import Probes, split_address
from fleetplane.kernel.errors import SettingsError


async def asked(port: int, request: bytes = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[str, bytes]:
    """The status line and the body; both empty if it hung up."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


async def test_an_agent_is_well_while_it_is_connected(rig: Rig, server: InstanceServerDouble) -> None:
    rig.settings = replace(rig.settings, health_addr="127.0.0.1:0")
    agent = rig.agent()
    assert agent.probes is not None
    task = asyncio.create_task(agent.probes.run(agent._node.log))
    try:
        await until(lambda: agent.probes is not None and agent.probes.port)
        assert await asked(agent.probes.port) == ("HTTP/1.1 503 Service Unavailable", b"not connected\n")
    finally:
        task.cancel()
    async with rig.running() as agent:
        assert agent.probes is not None
        await until(lambda: agent.is_connected and server.files)
        assert await asked(agent.probes.port) == ("HTTP/1.1 200 OK", b"ok\n")
        head = b"HEAD / HTTP/1.1\r\n\r\n"
        assert await asked(agent.probes.port, head) == ("HTTP/1.1 200 OK", b"")
        await server.stop()
        await until(lambda: not agent.is_connected)
        assert (await asked(agent.probes.port))[0] == "HTTP/1.1 503 Service Unavailable"


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (b"POST / HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"x" * (probes.HEAD_LIMIT_BYTES + 1) + b"\r\n\r\n", ""),
        (b"\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
    ],
)
async def test_what_is_no_question_gets_no_answer(rig: Rig, request_: bytes, line: str) -> None:
    answers = Probes("127.0.0.1:0", lambda: True)
    task = asyncio.create_task(answers.run(rig.agent()._node.log))
    try:
        await until(lambda: answers.port)
        assert (await asked(answers.port, request_))[0] == line
        assert (await asked(answers.port))[0] == "HTTP/1.1 200 OK", "the next one is served"
    finally:
        task.cancel()


async def test_an_address_that_is_taken_does_not_stop_the_agent(
    rig: Rig, server: InstanceServerDouble
) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        rig.settings = replace(rig.settings, health_addr=f"127.0.0.1:{port}")
        async with rig.running() as agent:
            await until(lambda: agent.is_connected and server.files)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":8080", ("", 8080))],
)
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["x", "host:", "host:http", "host:65536"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SettingsError):
        split_address(address)
