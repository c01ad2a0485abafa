"""A client that speaks HTTP/2 frame by frame, to do what the official one never would."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
from support.rpc.probe import SERVICE


@dataclass
class Stream:
    headers: dict[bytes, bytes] = field(default_factory=dict)
    trailers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytes = b""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    reset: int | None = None

    @property
    def code(self) -> int | None:
        value = self.trailers.get(b"grpc-status", self.headers.get(b"grpc-status"))
        return int(value) if value is not None else None


class RawClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = h2.config.H2Configuration(
            client_side=True,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = h2.connection.H2Connection(config)
        self.streams: dict[int, Stream] = {}
        self.goaway: h2.events.ConnectionTerminated | None = None
        self.pongs = 0
        self.acknowledging = True
        """Whether to open the window again for what arrives."""
        self.closed = asyncio.Event()
        self._reader, self.writer = reader, writer

    async def read_forever(self) -> None:
        try:
            while data := await self._reader.read(65536):
                for event in self.h2.receive_data(data):
                    self._handle(event)
                self.flush()
        except (OSError, h2.exceptions.ProtocolError):
            pass
        finally:
            self.closed.set()
            for stream in self.streams.values():
                stream.ended.set()

    def _handle(self, event: Any) -> None:
        stream = self.streams.get(getattr(event, "stream_id", None) or -1)
        match event:
            case h2.events.ResponseReceived() if stream:
                stream.headers = dict(event.headers)
            case h2.events.TrailersReceived() if stream:
                stream.trailers = dict(event.headers)
            case h2.events.DataReceived() if stream:
                stream.data += event.data
                if self.acknowledging:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            case h2.events.StreamReset() if stream:
                stream.reset = event.error_code
                stream.ended.set()
            case h2.events.StreamEnded() if stream:
                stream.ended.set()
            case h2.events.PingAckReceived():
                self.pongs += 1
            case h2.events.ConnectionTerminated():
                self.goaway = event

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.writer.write(data)

    def open(
        self, path: str = f"/{SERVICE}/Unary", *extra: tuple[bytes, bytes], drop: tuple[bytes, ...] = ()
    ) -> tuple[int, Stream]:
        number = self.h2.get_next_available_stream_id()
        stream = self.streams[number] = Stream()
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":authority", b"probe"),
            (b":path", path.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        ]
        replaced = {name for name, _ in extra} | set(drop)
        self.h2.send_headers(number, [pair for pair in headers if pair[0] not in replaced] + list(extra))
        self.flush()
        return number, stream

    def send(self, number: int, data: bytes, *, end: bool = False) -> None:
        self.h2.send_data(number, data, end_stream=end)
        self.flush()

    async def call(self, body: bytes, path: str = f"/{SERVICE}/Unary", *extra: tuple[bytes, bytes]) -> Stream:
        number, stream = self.open(path, *extra)
        self.send(number, body, end=True)
        async with asyncio.timeout(60):
            await stream.ended.wait()
        return stream


@contextlib.asynccontextmanager
async def connect(address: str) -> AsyncIterator[RawClient]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    client = RawClient(reader, writer)
    client.h2.initiate_connection()
    client.flush()
    reading = asyncio.create_task(client.read_forever())
    try:
        yield client
    finally:
        reading.cancel()
        writer.close()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await reading
        with contextlib.suppress(OSError):
            await writer.wait_closed()
