"""One task writes to a stream; whoever stops waiting does not end the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.node import link
from fleetplane.node.link import LinkLost, LinkOptions, ServerRefused
from fleetplane.node.writer import QUEUE_LIMIT, StreamWriter

OPTIONS = LinkOptions(refusals=frozenset({grpc.StatusCode.PERMISSION_DENIED}))
LARGE = b"x" * link.MIB
"""More than flow control lets through while nobody reads."""


def translate(error: grpc.aio.AioRpcError) -> FleetplaneError:
    return link.translated(error, OPTIONS)


class Server:
    """Reads when it is told to, and ends the stream when it is told to."""

    def __init__(self) -> None:
        self.read, self.end = asyncio.Event(), asyncio.Event()
        self.received: list[int] = []

    async def handle(self, requests: Any, context: Any) -> None:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(context))
            await self.end.wait()
            reading.cancel()
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")

    async def _read(self, context: Any) -> None:
        await self.read.wait()
        while (message := await context.read()) is not grpc.aio.EOF:
            self.received.append(len(message))


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[StreamWriter[bytes]]:
    host = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Talk": grpc.stream_stream_rpc_method_handler(server.handle)
    }
    host.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = host.add_insecure_port("127.0.0.1:0")
    await host.start()
    try:
        async with link.channel(f"127.0.0.1:{port}", link.PLAINTEXT, OPTIONS) as channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/test.Service/Talk")()
            yield StreamWriter(call, translate)
            call.cancel()
    finally:
        await host.stop(None)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_sender_that_is_cancelled_leaves_the_stream_standing() -> None:
    server = Server()
    async with opened(server) as writer, asyncio.TaskGroup() as tasks:
        await writer.first(b"hello")
        running = tasks.create_task(writer.run())
        senders = [tasks.create_task(writer.send(LARGE)) for _ in range(4)]
        await asyncio.sleep(0)  # each takes its first step: it hands its message over, and waits
        assert not all(one.done() for one in senders)
        for one in senders:
            one.cancel()
        server.read.set()
        await writer.send(b"goodbye")
        await until(lambda: len(b"goodbye") in server.received)
        assert server.received == [len(b"hello"), *[len(LARGE)] * 4, len(b"goodbye")], (
            "nothing handed over is lost"
        )
        running.cancel()


async def test_how_the_stream_ended_is_told_by_the_writer() -> None:
    server = Server()
    async with opened(server) as writer:
        await writer.first(b"hello")
        running = asyncio.create_task(writer.run())
        server.end.set()
        await until(writer._call.done)
        with pytest.raises(LinkLost):
            await writer.send(b"late")
        with pytest.raises(ServerRefused, match="PERMISSION_DENIED: not you"):
            await running
        with pytest.raises(LinkLost):
            await writer.send(b"later")
        with pytest.raises(ServerRefused):
            await writer.first(b"again")


async def test_whoever_waits_is_let_go_when_the_stream_ends() -> None:
    server = Server()
    async with opened(server) as writer:
        await writer.first(b"hello")
        running = asyncio.create_task(writer.run())
        messages = [b"small", *[LARGE] * (QUEUE_LIMIT + 8)]
        senders = [asyncio.create_task(writer.send(one)) for one in messages]
        await until(senders[0].done)
        server.end.set()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*senders, return_exceptions=True)
            (told,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(told, LinkLost | ServerRefused)
        assert {type(one) for one in outcomes} == {LinkLost, type(None)}
        assert isinstance(outcomes[-1], LinkLost)


async def test_those_who_wait_for_room_are_let_go_however_many_they_are() -> None:
    async with opened(Server()) as writer:
        await writer.first(b"hello")
        running = asyncio.create_task(writer.run())
        senders = [asyncio.create_task(writer.send(LARGE)) for _ in range(4 * QUEUE_LIMIT)]
        await asyncio.sleep(0)  # each takes its first step: those for whom there is no room wait for it
        running.cancel()
        async with asyncio.timeout(60):
            outcomes = await asyncio.gather(*senders, return_exceptions=True)
        assert {type(one) for one in outcomes} <= {LinkLost, type(None)}
        assert isinstance(outcomes[-1], LinkLost)
