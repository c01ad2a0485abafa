"""Length-prefixed messages: one byte of flags, four of length, then the message.

Pure: bytes in, bytes out. Decides what a legal frame is and how large one may become, also
when it arrives compressed. Knows no HTTP, no status codes and no protobuf.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable
from typing import Final

PREFIX_BYTES: Final = 5
_PREFIX = struct.Struct(">BI")
_GZIP_WINDOW = 31  # zlib's way of saying: a gzip header and trailer around the stream
_ZLIB_WINDOW = 15  # gRPC's "deflate" is the zlib format, not raw deflate
_GZIP_LEVEL = 1  # control-plane messages repeat themselves: level 1 gets most of it at a fifth of the time

IDENTITY: Final = b"identity"
GZIP: Final = b"gzip"
DEFLATE: Final = b"deflate"
_WINDOWS = {GZIP: _GZIP_WINDOW, DEFLATE: _ZLIB_WINDOW}
ENCODINGS: Final = frozenset((IDENTITY, GZIP, DEFLATE))
ACCEPT_ENCODING: Final = b"identity, gzip, deflate"


class FramingError(Exception):
    """The bytes are no sequence of gRPC messages."""


class MessageTooLarge(Exception):
    """A message is, or would become, larger than this method takes."""

    def __init__(self, size: int | None, limit: int) -> None:
        self.size = size
        """Unknown when decompression was stopped at the limit."""
        self.limit = limit
        found = f"{size} bytes" if size is not None else f"more than {limit} bytes after decompression"
        super().__init__(f"message of {found} is larger than the limit of {limit} bytes")


def prefix(payload: bytes, *, compressed: bool = False) -> bytes:
    """The message as it goes on the wire."""
    return _PREFIX.pack(compressed, len(payload)) + payload


class Framed:
    """One or more encoded messages, framed once and sent to any number of callers as they are."""

    __slots__ = ("body", "messages")

    body: bytes
    messages: int

    def __init__(self, payload: bytes) -> None:
        self._set(_PREFIX.pack(0, len(payload)) + payload, 1)

    def _set(self, body: bytes, messages: int) -> None:
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "messages", messages)

    @classmethod
    def join(cls, parts: Iterable[Framed]) -> Framed:
        """Several messages as one chunk, in order."""
        held = tuple(parts)
        joined = cls.__new__(cls)
        joined._set(b"".join([part.body for part in held]), sum(part.messages for part in held))
        return joined

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Framed) and other.body == self.body

    def __hash__(self) -> int:
        return hash(self.body)

    def __repr__(self) -> str:
        return f"<Framed messages={self.messages} bytes={len(self.body)}>"


def compress(payload: bytes, encoding: bytes) -> bytes:
    if encoding == GZIP:
        return gzip.compress(payload, compresslevel=_GZIP_LEVEL, mtime=0)
    return zlib.compress(payload, _GZIP_LEVEL)


def decompress(payload: bytes, encoding: bytes, limit: int) -> bytes:
    """The message inside, never holding more than one byte over `limit` of it.

    A few kilobytes can promise gigabytes, so the output is bounded while it is made.
    """
    window = _WINDOWS.get(encoding)
    if window is None:
        raise FramingError("a message is marked compressed, but the call named no compression")
    stream = zlib.decompressobj(wbits=window)
    try:
        message = stream.decompress(payload, limit + 1)
    except zlib.error as error:
        raise FramingError(f"a message is no valid {encoding.decode()} stream") from error
    if len(message) > limit:
        raise MessageTooLarge(None, limit)
    if not stream.eof or stream.unused_data:
        raise FramingError(f"a message is not exactly one {encoding.decode()} stream")
    return message


class FrameDecoder:
    """Messages out of chunks that begin and end anywhere.

    Feed a chunk, then take messages until there is none. The buffer never holds more than one
    message of the permitted size and one chunk, because a caller feeds only when `take` has
    nothing left to give.
    """

    __slots__ = ("_at", "_buffer", "_encoding", "_limit")

    def __init__(self, *, limit: int, encoding: bytes = IDENTITY) -> None:
        self._limit = limit
        self._encoding = encoding
        self._buffer: bytes | bytearray = b""
        self._at = 0

    def feed(self, chunk: bytes) -> None:
        if self._at == len(self._buffer):
            self._buffer = chunk
        elif type(self._buffer) is bytearray and self._at == 0:
            self._buffer += chunk
        else:
            rest = bytearray(memoryview(self._buffer)[self._at :])
            rest += chunk
            self._buffer = rest
        self._at = 0

    def take(self) -> bytes | None:
        """The next whole message, decompressed, or None until more is fed."""
        start = self._at + PREFIX_BYTES
        if len(self._buffer) < start:
            return None
        flags, size = _PREFIX.unpack_from(self._buffer, self._at)
        if flags > 1:
            raise FramingError(f"unknown flags {flags:#04x} in a message's prefix")
        if size > self._limit:
            raise MessageTooLarge(size, self._limit)
        end = start + size
        if len(self._buffer) < end:
            return None
        self._at = end
        payload = bytes(memoryview(self._buffer)[start:end])
        return decompress(payload, self._encoding, self._limit) if flags else payload

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer) - self._at

    def finish(self) -> None:
        """Say that no more will be fed; half a message left over is an error."""
        if self._at != len(self._buffer):
            raise FramingError("the request ended in the middle of a message")
