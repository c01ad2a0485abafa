"""Running one program to its end: its own session, both outputs as they come, and nothing left behind.

A guard stands between the agent and the program (`containment.py`). Stopping means all that the program ever
started, whatever session it is in: asked first (TERM), made to a little later (KILL). What a program leaves
behind when it ends is ended with it, unless its containment lets it detach.

A program never waits because its output is too long: output beyond the limit is read and counted. It waits
while the receiver of its output waits, so that output which is passed on needs no memory here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from fleetplane.node.programs import containment as guard
from fleetplane.node.programs.containment import Containment, Program, resource_limits

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


CHUNK_BYTES: Final = 32 * 1024
GUARD_SECONDS: Final = 7.0
"""After the time between TERM and KILL, for the guard to end what the program left behind: it takes five at
most."""
LINGER_SECONDS: Final = 1.0
"""Seconds for the last output of processes that hold the outputs open after the program has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramExit:
    exit_code: int
    """-1 for a program that a signal ended."""
    signal: int
    timed_out: bool = False
    is_known: bool = True
    """False if the guard was killed, and the program with it."""


class _Pump:
    """Copies one output of the program to its receiver."""

    def __init__(self, channel: ProgramStream, reader: asyncio.StreamReader, output: ProgramOutput) -> None:
        self._channel, self._reader, self._output = channel, reader, output
        self.moved = 0
        self.waiting = False

    def __repr__(self) -> str:
        return f"<_Pump {self._channel} moved={self.moved} waiting={self.waiting}>"

    async def run(self) -> None:
        while data := await self._reader.read(CHUNK_BYTES):
            self.moved += len(data)
            self.waiting = True  # this holds the program up, and not our memory
            await self._output.take(self._channel, data)
            self.waiting = False


async def run(
    program: Program, containment: Containment, output: ProgramOutput, *, timeout_seconds: float | None = None
) -> ProgramExit:
    """Run a program to its end, or to the end of its time.

    Raises OSError if it cannot be started. Cancelled, it returns once nothing of the program is left;
    cancelled again, the program is killed at once.
    """
    # Pipes of our own: those of asyncio's make waiting for the program mean waiting for everyone who
    # ever got hold of its outputs.
    limits = await asyncio.to_thread(resource_limits, containment)
    async with AsyncExitStack() as readers:
        status = _status_pipe(readers)
        with ExitStack() as writers:
            writers.callback(os.close, status[1])
            out_reader, out_writer = await _pipe(readers, writers)
            err_reader, err_writer = await _pipe(readers, writers)
            guarded = await guard.start(
                program, containment, limits=limits, status=status[1], stdout=out_writer, stderr=err_writer
            )
        out, err = (
            _Pump(ProgramStream.STDOUT, out_reader, output),
            _Pump(ProgramStream.STDERR, err_reader, output),
        )
        longest = containment.term_seconds + GUARD_SECONDS
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(out.run()), tasks.create_task(err.run())]
                if guarded.stdin is not None:
                    running.append(tasks.create_task(_feed(guarded.stdin, program.stdin)))
                timed_out = await _timed_out(guarded, timeout_seconds)
                if timed_out:  # its last words are still taken
                    _tell(guarded)
                    await _wait(guarded, longest)
                await _until_silent(running, (out, err))
        finally:
            await _end(guarded, longest)
        raw = guard.outcome(os.read(status[0], guard.STATUS_LIMIT_BYTES))
    code = os.waitstatus_to_exitcode(raw) if raw is not None else -int(signal.SIGKILL)
    return ProgramExit(
        exit_code=code if code >= 0 else -1,
        signal=-code if code < 0 else 0,
        timed_out=timed_out,
        is_known=raw is not None,
    )


def _status_pipe(readers: AsyncExitStack) -> tuple[int, int]:
    reading, writing = os.pipe()
    readers.callback(os.close, reading)
    return reading, writing


async def _pipe(readers: AsyncExitStack, writers: ExitStack) -> tuple[asyncio.StreamReader, int]:
    """A pipe's end to read from, and the descriptor to write to; each is closed with its stack."""
    reading, writing = os.pipe()
    writers.callback(os.close, writing)
    reader = asyncio.StreamReader(limit=CHUNK_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb", 0)
    )
    readers.callback(transport.close)
    return reader, writing


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it need not read what it is given
        writer.write(data)
        await writer.drain()
        writer.close()


async def _timed_out(guarded: asyncio.subprocess.Process, seconds: float | None) -> bool:
    """Whether the time ran out before the guard ended."""
    try:
        async with asyncio.timeout(seconds):
            await guarded.wait()
    except TimeoutError:
        return True
    return False


async def _until_silent(running: Sequence[asyncio.Task[None]], pumps: Sequence[_Pump]) -> None:
    """Wait until both outputs have ended, or whatever holds them open has written nothing for a while."""
    while True:
        before = sum(pump.moved for pump in pumps)
        _, open_still = await asyncio.wait(running, timeout=LINGER_SECONDS)
        if not open_still:
            return
        if sum(pump.moved for pump in pumps) == before and not any(pump.waiting for pump in pumps):
            for task in open_still:
                task.cancel()
            return


async def _end(guarded: asyncio.subprocess.Process, seconds: float) -> None:
    """Nothing of the program is left when this returns. Cancelled again meanwhile, it is ended at once."""
    if guarded.returncode is not None:
        return
    hurried = False
    _tell(guarded)
    waiting = asyncio.ensure_future(_wait(guarded, seconds))
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.done():
                break
            if not hurried and guarded.returncode is None:
                _tell(guarded)
            hurried = True
    if hurried:
        raise asyncio.CancelledError


def _tell(guarded: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # it ended, and nobody has looked yet
        guarded.send_signal(signal.SIGTERM)


async def _wait(guarded: asyncio.subprocess.Process, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await guarded.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):  # it ended at this very moment
            guarded.kill()
        await guarded.wait()
