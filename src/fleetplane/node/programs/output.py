"""What is kept of a program's output, and how it is passed on while the program runs.

A program is never held up because its output is too long: what nobody keeps is read and counted. It is held
up while the receiver of its output waits, so that output which is passed on needs no memory here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Final, Protocol

FLOOD_SECONDS: Final = 0.0025
"""Pause after each chunk that is only counted: at 32 KiB a chunk, some 12 MB a second."""
TAIL_BYTES: Final = 128 * 1024
"""Kept of each output for the result. Two of these fit a message of 4 MiB ten times over."""


class ProgramStream(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


Emit = Callable[[ProgramStream, bytes], Awaitable[None]]


class ProgramOutput(Protocol):
    async def take(self, channel: ProgramStream, data: bytes) -> None:
        """Receive a chunk, in order per channel. Waiting here holds the program up."""
        ...


class Ends:
    """The beginning and the end of an output."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = limit_bytes - limit_bytes // 2
        self._tail_limit = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def __repr__(self) -> str:
        return f"<Ends {len(self._head)}+{len(self._tail)} of {self.total}>"

    @property
    def truncated(self) -> bool:
        return self.total > len(self._head) + len(self._tail)

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]

    def __bytes__(self) -> bytes:
        left_out = self.total - len(self._head) - len(self._tail)
        between = b"\n... %d bytes left out ...\n" % left_out if left_out else b""
        return bytes(self._head) + between + bytes(self._tail)


class KeptOutput:
    """Keep the beginning and the end of each output; nothing is passed on."""

    def __init__(self, limit_bytes: int) -> None:
        self.stdout = Ends(limit_bytes)
        self.stderr = Ends(limit_bytes)

    def __repr__(self) -> str:
        return f"<Kept {self.stdout!r} {self.stderr!r}>"

    async def take(self, channel: ProgramStream, data: bytes) -> None:
        ends = self.stdout if channel is ProgramStream.STDOUT else self.stderr
        ends.add(data)
        if ends.truncated:  # nobody needs it fast any more, and others need the processor
            await asyncio.sleep(FLOOD_SECONDS)


class OutputTail:
    """The last bytes of what was written to it."""

    def __init__(self, limit_bytes: int = TAIL_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held = bytearray()

    def __repr__(self) -> str:
        return f"<Tail {len(self._held)}/{self._limit_bytes}>"

    def add(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > self._limit_bytes:
            del self._held[: len(self._held) - self._limit_bytes]

    def __bytes__(self) -> bytes:
        return bytes(self._held)


class Streamed:
    """Pass output on as it comes, up to a limit for both channels together, and keep the end of each."""

    def __init__(self, emit: Emit, *, limit_bytes: int) -> None:
        self._emit = emit
        self._left = limit_bytes
        self.dropped_bytes = 0
        """Read after the limit was reached, and not passed on."""
        self.stdout, self.stderr = OutputTail(), OutputTail()

    def __repr__(self) -> str:
        return f"<Streamed left={self._left} dropped={self.dropped_bytes}>"

    async def take(self, channel: ProgramStream, data: bytes) -> None:
        (self.stdout if channel is ProgramStream.STDOUT else self.stderr).add(data)
        taken = data[: self._left]
        self._left -= len(taken)
        self.dropped_bytes += len(data) - len(taken)
        if taken:
            await self._emit(channel, taken)
