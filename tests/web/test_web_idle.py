"""A connection that nobody uses is given up; one that carries a quiet stream is not."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets

from fleetplane.rpc import Listener, ListenerSpec, open_listener

IDLE_SECONDS = 4.0
"""Longer than a busy machine may take between a connection and what is said on it."""
QUIET_SECONDS = 1.5 * IDLE_SECONDS
DEADLINE_SECONDS = 60.0
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
HTTP_1 = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def http_2_request(method: bytes, *, ends: bool) -> bytes:
    head = method + b"\x86\x84\x01\x01x"
    return struct.pack(">I", len(head))[1:] + bytes([1, 4 | ends]) + struct.pack(">I", 1) + head


async def quiet(scope: Any, receive: Any, send: Any) -> None:
    """Says nothing for a while, then its last word."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await asyncio.sleep(QUIET_SECONDS)
        await send({"type": "websocket.send", "text": "late"})
        await receive()
        return
    if scope["method"] == "POST":
        await receive()
    elif scope["path"] == "/quiet":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await asyncio.sleep(QUIET_SECONDS)
        await send({"type": "http.response.body", "body": b"late"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"at once"})


@asynccontextmanager
async def listening(idle_seconds: float) -> AsyncIterator[tuple[Listener, str, int]]:
    spec = ListenerSpec(
        name="web", addresses=("127.0.0.1:0",), app=quiet, http1=True, idle_seconds=idle_seconds
    )
    async with open_listener(spec, grace_seconds=0.1) as listener:
        host, _, port = listener.addresses[0].removeprefix("http://").rpartition(":")
        yield listener, host, int(port)


async def read_to_the_end(host: str, port: int, said: bytes) -> bytes:
    """Everything that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(said)
        await writer.drain()
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await reader.read(-1)
    finally:
        writer.close()


async def test_a_connection_without_a_request_is_given_up() -> None:
    said = {
        "HTTP/2, nothing asked": GREETING,
        "HTTP/2, answered": GREETING + http_2_request(b"\x82", ends=True),
        "HTTP/1.1, answered": HTTP_1,
    }
    async with listening(IDLE_SECONDS) as (_, host, port):
        heard = await asyncio.gather(*(read_to_the_end(host, port, one) for one in said.values()))
    for name, one in zip(said, heard, strict=True):
        assert one, f"{name}: it was greeted or answered before"


async def test_a_body_that_stands_still_is_given_up() -> None:
    async with listening(IDLE_SECONDS) as (_, host, port):
        await read_to_the_end(host, port, GREETING + http_2_request(b"\x83", ends=False))


async def test_a_quiet_stream_and_a_quiet_websocket_go_on() -> None:
    async with listening(IDLE_SECONDS) as (listener, host, port):
        request = b"GET /quiet HTTP/1.1\r\nhost: x\r\n\r\n"
        stream = asyncio.create_task(read_to_the_end(host, port, request))
        async with (
            websockets.connect(listener.addresses[0].replace("http", "ws", 1), ping_interval=None) as socket,
            asyncio.timeout(DEADLINE_SECONDS),
        ):
            assert await socket.recv() == "late"
        assert b"late" in await stream


async def test_agents_connections_may_be_idle_for_ever() -> None:
    async with listening(ListenerSpec(name="x", addresses=(), app=quiet).idle_seconds) as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(GREETING)
        await reader.readexactly(9)  # a frame of its greeting
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(-1), QUIET_SECONDS)
        writer.close()
