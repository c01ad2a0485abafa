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
CUT_HEAD_BYTES = 64 * 1024
"""Kept of a message that is cut: more than everything that stands before its large parts."""
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


class UnparsableMessage(FramingError):
    """The bytes of a message are not an encoding of the method's type."""


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


class CutMessage(bytes):
    """The beginning of a message that was larger than its method takes; the rest was read and dropped."""

    size: int
    """Bytes that the whole of it had."""

    @classmethod
    def of(cls, head: bytes, size: int) -> CutMessage:
        made = cls(head)
        made.size = size
        return made


class FrameDecoder:
    """Messages out of chunks that begin and end anywhere.

    Feed a chunk, then take messages until there is none. The buffer never holds more than one
    message of the permitted size and one chunk, because a caller feeds only when `take` has
    nothing left to give.
    """

    __slots__ = ("_at", "_buffer", "_cut", "_cutting", "_encoding", "_limit", "_skip")

    def __init__(self, *, limit: int, encoding: bytes = IDENTITY, cut: bool = False) -> None:
        """`cut` gives the beginning of a message that is too large, instead of an error."""
        self._limit = limit
        self._cut = cut
        self._cutting: CutMessage | None = None
        self._skip = 0
        """Bytes of a message that is being cut which are still to come."""
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
        if self._cutting is not None:
            return self._dropped()
        start = self._at + PREFIX_BYTES
        if len(self._buffer) < start:
            return None
        flags, size = _PREFIX.unpack_from(self._buffer, self._at)
        if flags > 1:
            raise FramingError(f"unknown flags {flags:#04x} in a message's prefix")
        if size > self._limit:
            if flags or not self._cut:
                raise MessageTooLarge(size, self._limit)
            if len(self._buffer) < start + min(CUT_HEAD_BYTES, self._limit):
                return None
            self._cutting = CutMessage.of(bytes(memoryview(self._buffer)[start:][:CUT_HEAD_BYTES]), size)
            self._at, self._skip = start, size
            return self._dropped()
        end = start + size
        if len(self._buffer) < end:
            return None
        self._at = end
        payload = bytes(memoryview(self._buffer)[start:end])
        return decompress(payload, self._encoding, self._limit) if flags else payload

    def _dropped(self) -> bytes | None:
        """Pass over what has come of a message that is being cut; its beginning once all of it has."""
        passed = min(self._skip, len(self._buffer) - self._at)
        self._at += passed
        self._skip -= passed
        if self._skip:
            return None
        made, self._cutting = self._cutting, None
        return made

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer) - self._at

    def finish(self) -> None:
        """Mark the end of input; a partial message left over is an error."""
        if self._at != len(self._buffer) or self._cutting is not None:
            raise FramingError("the request ended in the middle of a message")
