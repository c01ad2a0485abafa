"""The original board agent as a server sees it: the same frames, bytes and order, its oddities included.

Requests are put together by hand from the numbers of the contract, not by our generated code, and
travel over HTTP/2 in clear text with the headers of the original's library. It registers, looks for
itself in the first hundred nodes when it is known already, repeats for ever the status that it was
told, and says MAINTENANCE when it is asked to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import h2.events
from support.shared.h2_grpc import GrpcFailed, H2Channel, H2Stream

ALREADY_EXISTS = 6
READY, MAINTENANCE, WORKER = 3, 5, 2
SERVICE = "/pi_controller.PiControllerService/"
CALL_TIMEOUT = "59999m"
"""In the originals' spelling; they allow 2, 5, 10 or 30 s, however slow the machine is."""


class ProcessExit(Exception):
    """The agent's process would end here with code 1."""


# Wire format.


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def text(field: int, value: str) -> bytes:
    raw = value.encode()
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message with varints and lengths only, as the answers here are."""
    at = 0

    def take() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(message):
        tag = take()
        if tag & 7 == 0:
            yield tag >> 3, take()
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length = take()
            yield tag >> 3, message[at : at + length]
            at += length


def node(message: bytes) -> dict[int, Any]:
    return dict(fields(message))


# Transport.


class PlainChannel(H2Channel):
    """Clear text, with the headers of the original's library."""

    def __init__(self, authority: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(authority, reader, writer)
        self.pongs = 0

    def open(self, path: str, timeout: str = CALL_TIMEOUT) -> H2Stream:
        if self._lost is not None:
            raise GrpcFailed(14, self._lost)
        stream_id = self._h2.get_next_available_stream_id()
        stream = self._streams[stream_id] = H2Stream(self, stream_id)
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", self._authority),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-go/1.75.0"),
            ("te", "trailers"),
            ("grpc-timeout", timeout),
        ]
        self._h2.send_headers(stream_id, headers)
        self._flush()
        return stream

    def ping(self) -> None:
        self._h2.ping(b"\x02\x04\x10\x10\x09\x0e\x07\x07")
        self._flush()

    def _handle(self, event: h2.events.Event) -> None:
        self.pongs += isinstance(event, h2.events.PingAckReceived)
        super()._handle(event)


@contextlib.asynccontextmanager
async def dial(address: str) -> AsyncIterator[PlainChannel]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    channel = PlainChannel(address, reader, writer)
    reading = asyncio.create_task(channel.read_forever())
    try:
        yield channel
    finally:
        reading.cancel()
        writer.close()
        await asyncio.wait([reading])
        with contextlib.suppress(OSError):
            await writer.wait_closed()


# The agent.


class OriginalBoardAgent:
    def __init__(
        self,
        address: str,
        *,
        mac: str,
        ip: str,
        node_name: str = "",
        architecture: str = "arm64",
        cpu_cores: int = 4,
    ) -> None:
        self._address = address
        self.mac, self.ip, self.architecture, self.cpu_cores = mac, ip, architecture, cpu_cores
        on_board = architecture in ("arm", "arm64")
        self.model = "raspberry-pi" if on_board else f"generic-{architecture}"
        self.name = node_name or (f"{self.model}-{mac.replace(':', '')}" if mac else f"node-{ip}")
        self.channel: PlainChannel | None = None
        self.id = 0
        self.status = 0
        self.calls: list[str] = []
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Dial, register; or register again, if the server says that it is known."""
        self.channel = await self._stack.enter_async_context(dial(self._address))
        try:
            found = node(await self._call("CreateNode", self.create_request(), timeout=CALL_TIMEOUT))
        except GrpcFailed as error:
            if error.code != ALREADY_EXISTS:
                raise ProcessExit(f"failed to register: {error}") from error
            found = await self._register_again()
        self.id, self.status = found[1], found.get(5, 0)

    def create_request(self) -> bytes:
        return b"".join(
            [
                text(1, self.name),
                text(2, self.ip),
                text(3, self.mac),
                number(4, WORKER),
                text(5, self.architecture),
                text(6, self.model),
                number(8, self.cpu_cores),
            ]
        )

    async def _register_again(self) -> dict[int, Any]:
        listed = await self._call("ListNodes", number(1, 1) + number(2, 100))
        nodes = [node(value) for field, value in fields(listed) if field == 1 and isinstance(value, bytes)]
        own = [
            one
            for one in nodes
            if one.get(4, b"").decode() == self.mac or one.get(3, b"").decode() == self.ip
        ]
        if not own:
            raise ProcessExit("node already exists but is not in the list")
        return node(await self._call("UpdateNode", self.update_request(own[0][1])))

    def update_request(self, identity: int) -> bytes:
        """Explicit blanks where it knows nothing: they are sent, because those fields have presence."""
        return b"".join(
            [
                number(1, identity),
                text(2, self.name),
                text(3, self.ip),
                text(4, self.mac),
                number(5, READY),
                number(6, WORKER),
                text(7, self.architecture),
                text(8, self.model),
                text(9, ""),
                number(10, self.cpu_cores),
                number(11, 0),
                text(15, "linux"),
                text(16, ""),
            ]
        )

    async def heartbeat(self) -> None:
        """What it does every thirty seconds."""
        await self._call("Health", b"")
        await self._call("UpdateNode", number(1, self.id) + number(5, self.status))

    async def health(self) -> bytes:
        return await self._call("Health", b"")

    async def sigterm(self) -> None:
        await self._call("UpdateNode", number(1, self.id) + number(5, MAINTENANCE))
        await self.kill()

    async def kill(self) -> None:
        await self._stack.aclose()
        self._stack = contextlib.AsyncExitStack()
        self.channel = None

    async def _call(self, method: str, request: bytes, *, timeout: str = CALL_TIMEOUT) -> bytes:
        assert self.channel is not None
        self.calls.append(method)
        stream = self.channel.open(SERVICE + method, timeout)
        await stream.send(request, end=True)
        return await stream.single()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
