"""A small HTTP/2 client for many gRPC streams on one core, cheap enough not to be what is measured.

Speaks just enough to talk to a server that behaves: prior knowledge, header fields written out in
full, flow control wide open. It reads no response headers: a message that arrives is the proof that
a call succeeded, and a reset or a stream that ends without a message is an error.
"""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from bench.servers import Server

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
MAX_WINDOW = 2**31 - 1
RECEIVE_BYTES = 32 * 1024
"""At a time. Larger buffers would be mapped and unmapped by the allocator for each read."""
FRAME_HEAD_BYTES = 9
PREFIX_BYTES = 5
PATIENCE_SECONDS = 60.0
SPARE_FILES = 256

OnMessage = Callable[["Connection", int, bytes], None]
"""Called with the connection, the stream and the message's bytes."""


def framed(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def head(path: str, authority: str) -> bytes:
    return (
        b"\x83\x86\x04"  # POST and http from HPACK's static table; then the path
        + bytes([len(path)])
        + path.encode()
        + b"\x01"
        + bytes([len(authority)])
        + authority.encode()
        + literal(b"content-type", b"application/grpc")
        + literal(b"te", b"trailers")
    )


GREETING = (
    PREFACE
    # No dynamic header table, no push, windows as large as they get.
    + framed(SETTINGS, 0, 0, struct.pack(">HIHIHI", 0x1, 0, 0x2, 0, 0x4, MAX_WINDOW))
    + framed(WINDOW_UPDATE, 0, 0, struct.pack(">I", MAX_WINDOW - 65_535))
)


class Connection:
    """One connection; its owner is told of each message."""

    __slots__ = ("_authority", "_buffer", "_carry", "_heads", "_next_stream", "_on_message", "socket")

    def __init__(self, server: Server, on_message: OnMessage) -> None:
        self.socket = self._dial(server)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._authority = server.authority
        self._on_message = on_message
        self._next_stream = 1
        self._heads: dict[str, bytes] = {}
        self._buffer = b""
        self._carry: dict[int, bytes] = {}
        self.socket.sendall(GREETING)

    def _dial(self, server: Server) -> socket.socket:
        return socket.create_connection((server.host, server.port))

    def _receive(self) -> bytes | None:
        """What came; None if that was nothing for us."""
        return self.socket.recv(RECEIVE_BYTES)

    def call(self, path: str, request: bytes) -> int:
        """Send a whole request; returns its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = self._heads.get(path)
        if fields is None:
            fields = self._heads[path] = head(path, self._authority)
        body = struct.pack(">BI", 0, len(request)) + request
        self.socket.sendall(
            framed(HEADERS, END_HEADERS, stream, fields) + framed(DATA, END_STREAM, stream, body)
        )
        return stream

    def readable(self) -> None:
        chunk = self._receive()
        if chunk is None:
            return
        if not chunk:
            raise RuntimeError("the server closed a connection")
        buffer = self._buffer + chunk if self._buffer else chunk
        at, end = 0, len(buffer)
        while end - at >= FRAME_HEAD_BYTES:
            size = int.from_bytes(buffer[at : at + 3], "big")
            body = at + FRAME_HEAD_BYTES
            if end - body < size:
                break
            at = body + size
            self._frame(buffer[body - 6], buffer[body - 5], buffer[body - 4 : body], buffer[body:at])
        self._buffer = buffer[at:]

    def _frame(self, kind: int, flags: int, stream: bytes, payload: bytes) -> None:
        if kind == DATA:
            if payload:
                self._data(int.from_bytes(stream, "big"), payload)
        elif kind == SETTINGS and not flags & ACK:
            self.socket.sendall(framed(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(framed(PING, ACK, 0, payload))
        elif kind in (RESET, GOAWAY):
            raise RuntimeError(f"the server ended a stream or connection: frame {kind}, {payload!r}")

    def _data(self, stream: int, payload: bytes) -> None:
        if self._carry:
            payload = self._carry.pop(stream, b"") + payload
        at, end = 0, len(payload)
        while end - at >= PREFIX_BYTES:
            after = at + PREFIX_BYTES + int.from_bytes(payload[at + 1 : at + PREFIX_BYTES], "big")
            if after > end:
                break
            self._on_message(self, stream, payload[at + PREFIX_BYTES : after])
            at = after
        if at < end:
            self._carry[stream] = payload[at:]


class Readable(Protocol):
    socket: socket.socket

    def readable(self) -> None:
        """It has something to say."""


class Crowd:
    """Many connections to one server, read as they have something to say."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._epoll = select.epoll()
        self._by_file: dict[int, Readable] = {}

    def connect(self, on_message: OnMessage, kind: type[Connection] = Connection) -> Connection:
        made = kind(self._server, on_message)
        self.adopt(made)
        return made

    def adopt(self, made: Readable) -> None:
        """Read from it too."""
        self._by_file[made.socket.fileno()] = made
        self._epoll.register(made.socket.fileno(), select.EPOLLIN)

    def forget(self, gone: Readable) -> None:
        self._epoll.unregister(gone.socket.fileno())
        del self._by_file[gone.socket.fileno()]

    def until(self, done: Callable[[], bool], *, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Read until it is done, or raise."""
        deadline = time.monotonic() + patience_seconds
        while not done():
            for file, _ in self._epoll.poll(1.0):
                self._by_file[file].readable()
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited longer than {patience_seconds} s for {self._server.name}")

    def close(self) -> None:
        for connection in self._by_file.values():
            connection.socket.close()
        self._epoll.close()


@contextlib.contextmanager
def crowd(server: Server) -> Iterator[Crowd]:
    made = Crowd(server)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def files_for(connections: int) -> Iterator[None]:
    """Let this process, and the servers it starts meanwhile, hold that many sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise SystemExit(f"{wanted} open files are needed, and {hard} is the limit: raise it (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
