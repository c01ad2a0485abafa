"""What stands behind streams in tests: servers that tell who they are and what reached them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import cast

from support.shared.free_ports import free_port


class LineServer:
    """Answers every line with its own name and the line; with TLS, where it is given a context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, ssl.SSLError):
                while line := await reader.readline():
                    writer.write(f"{self.name} ".encode() + line)
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.close()

    def break_all(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()


@contextlib.asynccontextmanager
async def line_server(name: str, context: ssl.SSLContext | None = None) -> AsyncIterator[LineServer]:
    made = LineServer(name)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.break_all()
        await server.wait_closed()


class _Answering(asyncio.DatagramProtocol):
    def __init__(self, name: str) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: object) -> None:
        self._transport.sendto(f"{self._name} ".encode() + data, addr)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def datagram_server(name: str) -> AsyncIterator[str]:
    """Its address."""
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Answering(name), ("127.0.0.1", 0))
    try:
        yield f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    finally:
        transport.close()


def free_datagram_port() -> int:
    return free_port(socket.SOCK_DGRAM)


async def said(port: int, line: str = "hello", *, trust: ssl.SSLContext | None = None, name: str = "") -> str:
    """What comes back for one line; empty if the connection is ended instead."""
    try:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=trust, server_hostname=name or None
        )
    except (OSError, ssl.SSLError):
        return ""
    try:
        async with asyncio.timeout(60.0):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                writer.write(f"{line}\n".encode())
                await writer.drain()
                return (await reader.readline()).decode().rstrip("\n")
            return ""
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


class _Asking(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self.answer.done():
            self.answer.set_result(data)


async def datagram(port: int, text: str) -> str:
    """What comes back for one datagram, which is repeated as a client of datagrams has to."""
    loop = asyncio.get_running_loop()
    transport, asking = await loop.create_datagram_endpoint(_Asking, remote_addr=("127.0.0.1", port))
    try:
        async with asyncio.timeout(60.0):
            while not asking.answer.done():
                transport.sendto(text.encode())
                await asyncio.wait([asking.answer], timeout=1.0)
        return asking.answer.result().decode()
    finally:
        transport.close()
