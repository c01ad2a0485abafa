"""gRPC by hand over Python's own TLS, for clients that the official library cannot play.

OpenSSL takes Ed25519 keys on both sides and can be told to speak TLS 1.3 only. One connection
carries every call, as with the clients of the protocol's first implementation.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import h2.exceptions

OK, CANCELLED, UNKNOWN, INTERNAL, UNAVAILABLE = 0, 1, 2, 13, 14
CALL_SECONDS = 60.0
FRAME_HEADER_BYTES, GOAWAY = 9, 7


class GrpcFailed(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"code {code}: {message}")
        self.code = code
        self.message = message


def tls_context(
    authority: Path, *, certificate: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """TLS 1.3 and nothing less; the host that is dialled must be in the server's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(authority)
    if certificate is not None:
        context.load_cert_chain(certificate, key)
    return context


class H2Stream:
    """One call: messages go up with `send`, come down by iteration; a bad status is raised at the end."""

    def __init__(self, channel: H2Channel, number: int) -> None:
        self._channel = channel
        self.number = number
        self._buffer = b""
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.fields: dict[str, str] = {}
        self.window_open = asyncio.Event()
        self.ended = asyncio.Event()
        self._lost: str | None = None

    async def send(self, message: bytes, *, end: bool = False) -> None:
        await self._channel.send(self, b"\0" + struct.pack(">I", len(message)) + message, end=end)

    async def done_sending(self) -> None:
        await self._channel.send(self, b"", end=True)

    def cancel(self) -> None:
        self._channel.reset(self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._incoming.get()) is not None:
            yield message
        self.check()

    async def single(self) -> bytes:
        """The one message of a call that has one."""
        async with asyncio.timeout(CALL_SECONDS):
            messages = [message async for message in self]
        if len(messages) != 1:
            raise GrpcFailed(INTERNAL, f"{len(messages)} messages where one was due")
        return messages[0]

    def check(self) -> None:
        """Raise unless the call ended with status 0."""
        if self._lost is not None:
            raise GrpcFailed(UNAVAILABLE, self._lost)
        if self.fields.get(":status") != "200":
            raise GrpcFailed(UNKNOWN, f"HTTP status {self.fields.get(':status')}")
        code = int(self.fields.get("grpc-status", UNKNOWN))
        if code != OK:
            raise GrpcFailed(code, urllib.parse.unquote(self.fields.get("grpc-message", "")))

    # What the connection has for us

    def receive(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 5:
            assert self._buffer[0] == 0, "nobody asked for compression"
            (length,) = struct.unpack(">I", self._buffer[1:5])
            if len(self._buffer) < 5 + length:
                return
            self._incoming.put_nowait(self._buffer[5 : 5 + length])
            self._buffer = self._buffer[5 + length :]

    def finish(self, lost: str | None = None) -> None:
        if not self.ended.is_set():
            self._lost = lost
            self.ended.set()
            self.window_open.set()
            self._incoming.put_nowait(None)


class H2Channel:
    def __init__(self, authority: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self._h2 = h2.connection.H2Connection(config)
        self._authority = authority
        self._reader, self._writer = reader, writer
        self._streams: dict[int, H2Stream] = {}
        self._lost: str | None = None
        self._unread = b""
        self.leaving = False
        """Whether the server wants no new streams on this connection."""
        self._h2.initiate_connection()
        self._flush()

    @property
    def tls_version(self) -> str:
        version: str = self._writer.get_extra_info("ssl_object").version()
        return version

    def open(self, path: str) -> H2Stream:
        if self._lost is not None:
            raise GrpcFailed(UNAVAILABLE, self._lost)
        number = self._h2.get_next_available_stream_id()
        stream = self._streams[number] = H2Stream(self, number)
        headers = [
            (":method", "POST"),
            (":scheme", "https"),
            (":path", path),
            (":authority", self._authority),
            ("content-type", "application/grpc"),
            ("user-agent", "grpc-go/1.76.0"),
            ("te", "trailers"),
        ]
        self._h2.send_headers(number, headers)
        self._flush()
        return stream

    async def unary(self, path: str, request: bytes) -> bytes:
        stream = self.open(path)
        await stream.send(request, end=True)
        return await stream.single()

    async def down(self, path: str, request: bytes) -> H2Stream:
        """A server stream, ready to be iterated."""
        stream = self.open(path)
        await stream.send(request, end=True)
        return stream

    async def send(self, stream: H2Stream, data: bytes, *, end: bool) -> None:
        """Within the windows that the server has opened."""
        while True:
            if stream.ended.is_set():
                return  # its end is met where it is read
            room = min(self._h2.local_flow_control_window(stream.number), self._h2.max_outbound_frame_size)
            if room >= len(data):
                self._h2.send_data(stream.number, data, end_stream=end)
                self._flush()
                return
            if room > 0:
                self._h2.send_data(stream.number, data[:room])
                self._flush()
                data = data[room:]
                continue
            stream.window_open.clear()
            await stream.window_open.wait()

    def reset(self, stream: H2Stream) -> None:
        if not stream.ended.is_set() and self._lost is None:
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self._h2.reset_stream(stream.number, 8)  # CANCEL
                self._flush()
            stream.fields |= {":status": "200", "grpc-status": str(CANCELLED)}
            stream.finish()

    async def read_forever(self) -> None:
        reason = "the server closed the connection"
        try:
            while data := await self._reader.read(65536):
                for event in self._h2.receive_data(self._without_goaway(data)):
                    self._handle(event)
                self._flush()
        except (OSError, h2.exceptions.ProtocolError) as error:
            reason = f"the connection broke: {error}"
        finally:
            self._lost = reason
            for stream in self._streams.values():
                stream.finish(lost=reason)

    def _without_goaway(self, data: bytes) -> bytes:
        """Whole frames, but not those that announce an end: streams that are open go on, as in Go.

        The library would take no frame after one of them.
        """
        self._unread += data
        frames = b""
        while len(self._unread) >= FRAME_HEADER_BYTES:
            end = FRAME_HEADER_BYTES + int.from_bytes(self._unread[:3], "big")
            if len(self._unread) < end:
                break
            frame, self._unread = self._unread[:end], self._unread[end:]
            if frame[3] == GOAWAY:
                self.leaving = True
            else:
                frames += frame
        return frames

    def _handle(self, event: h2.events.Event) -> None:
        stream = self._streams.get(getattr(event, "stream_id", None) or -1)
        match event:
            case h2.events.ResponseReceived() | h2.events.TrailersReceived() if stream:
                stream.fields |= {str(name): str(value) for name, value in event.headers}
            case h2.events.DataReceived():
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if stream:
                    stream.receive(event.data)
            case h2.events.StreamEnded() if stream:
                stream.finish()
            case h2.events.StreamReset() if stream:
                # A status that came before the reset stands: the server was done with us early.
                stream.finish(lost=None if "grpc-status" in stream.fields else "the server reset the stream")
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                for waiting in self._streams.values():
                    waiting.window_open.set()

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self._writer.write(data)


@contextlib.asynccontextmanager
async def connect(
    address: str, context: ssl.SSLContext, *, source: str | None = None
) -> AsyncIterator[H2Channel]:
    """`source` is the address to come from, if that matters."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(
            host,
            int(port),
            ssl=context,
            server_hostname=host.strip("[]"),
            local_addr=(source, 0) if source is not None else None,
        )
    except OSError as error:
        raise GrpcFailed(UNAVAILABLE, f"no connection to {address}: {error}") from error
    channel = H2Channel(address, reader, writer)
    reading = asyncio.create_task(channel.read_forever())
    try:
        yield channel
    finally:
        reading.cancel()
        writer.close()  # before anything is waited for: that may be cancelled too
        await asyncio.wait([reading])
        with contextlib.suppress(OSError):
            await writer.wait_closed()
