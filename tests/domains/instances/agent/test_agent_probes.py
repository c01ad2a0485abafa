"""Whether the agent works, for whoever asks over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from domains.instances.agent.agent_rig import Rig
from support.instances.instance_server_double import InstanceServerDouble, until

ALIVE = ("HTTP/1.1 200 OK", b"ok\n")


async def asked(port: int, request: bytes = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[str, bytes]:
    """The status line and the body; both empty if it hung up."""
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        try:
            answer = await reader.read()
        except ConnectionResetError:
            answer = b""
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


async def alive(port: int) -> tuple[str, bytes]:
    return await asked(port, b"GET /healthz HTTP/1.1\r\n\r\n")


async def test_an_agent_is_alive_while_it_runs_and_ready_while_it_is_connected(
    rig: Rig, server: InstanceServerDouble
) -> None:
    rig.settings = replace(rig.settings, health_addr="127.0.0.1:0")
    agent = rig.agent()
    assert agent.probes is not None
    task = asyncio.create_task(agent.probes.run(agent._node.log))
    try:
        await until(lambda: agent.probes is not None and agent.probes.port)
        assert await asked(agent.probes.port) == ("HTTP/1.1 503 Service Unavailable", b"not connected\n")
        assert await alive(agent.probes.port) == ALIVE
    finally:
        task.cancel()
    async with rig.running() as agent:
        probes = agent.probes
        assert probes is not None
        await until(lambda: probes.port and agent.is_connected and server.files)
        assert await asked(probes.port) == ALIVE
        head = b"HEAD /readyz?x=1 HTTP/1.1\r\n\r\n"
        assert await asked(probes.port, head) == ("HTTP/1.1 200 OK", b"")
        await server.stop()
        await until(lambda: not agent.is_connected)
        assert (await asked(probes.port))[0] == "HTTP/1.1 503 Service Unavailable"
        assert await alive(probes.port) == ALIVE, "the server's restart is not the machine's end"


async def test_an_address_that_is_taken_does_not_stop_the_agent(
    rig: Rig, server: InstanceServerDouble
) -> None:
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with taken:
        port = taken.sockets[0].getsockname()[1]
        rig.settings = replace(rig.settings, health_addr=f"127.0.0.1:{port}")
        async with rig.running() as agent:
            await until(lambda: agent.is_connected and server.files)
