"""Running one program to its end: its own session, both outputs as they come, and nothing left behind.

The program leads a process group of its own. Stopping means the whole group: asked first (TERM),
made to a little later (KILL). What a program leaves in its group when it ends is ended with it; what
made a session of its own has left on purpose.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.edge.agent.tools.contract import Channel, Emit

CHUNK_BYTES: Final = 32 * 1024
TERM_SECONDS: Final = 5.0
"""Between asking a group to end and ending it."""
LINGER_SECONDS: Final = 1.0
"""For the last words of whoever holds the outputs open after the program itself has ended."""
TAIL_BYTES: Final = 128 * 1024
"""Kept of each output for the result. Two of these fit a message of 4 MiB ten times over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    path: str
    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int
    """-1 for a program that a signal ended."""
    signal: int
    stdout: bytes
    stderr: bytes
    dropped_bytes: int
    """Beyond the limit: read, so that the program is not held up, and not sent on."""


class Tail:
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


class Allowance:
    """How much output may still be sent on, both channels together."""

    def __init__(self, limit_bytes: int) -> None:
        self._left = limit_bytes
        self.dropped_bytes = 0

    def __repr__(self) -> str:
        return f"<Allowance left={self._left} dropped={self.dropped_bytes}>"

    def take(self, data: bytes) -> bytes:
        taken = data[: self._left]
        self._left -= len(taken)
        self.dropped_bytes += len(data) - len(taken)
        return taken


class _Pump:
    """From one output of the program to whoever listens."""

    def __init__(
        self, channel: Channel, reader: asyncio.StreamReader, allowance: Allowance, emit: Emit
    ) -> None:
        self._channel, self._reader = channel, reader
        self._allowance, self._emit = allowance, emit
        self.tail = Tail()
        self.moved = 0
        self.sending = False

    def __repr__(self) -> str:
        return f"<_Pump {self._channel} moved={self.moved} sending={self.sending}>"

    async def run(self) -> None:
        while data := await self._reader.read(CHUNK_BYTES):
            self.moved += len(data)
            self.tail.add(data)
            if taken := self._allowance.take(data):
                self.sending = True  # waiting here holds the program up, and not our memory
                await self._emit(self._channel, taken)
                self.sending = False


async def run(
    program: Program, emit: Emit, *, output_limit_bytes: int, term_seconds: float = TERM_SECONDS
) -> Ended:
    """Raises OSError if the program cannot be started. Cancelled, it returns once the group is gone."""
    # Pipes of our own: those of asyncio's make waiting for the program mean waiting for everyone who
    # ever got hold of its outputs.
    async with AsyncExitStack() as readers:
        with ExitStack() as writers:
            out_reader, out_writer = await _pipe(readers, writers)
            err_reader, err_writer = await _pipe(readers, writers)
            child = await asyncio.create_subprocess_exec(
                program.path,
                *program.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out_writer,
                stderr=err_writer,
                cwd=program.folder,
                env=dict(program.environment),
                start_new_session=True,
            )
        allowance = Allowance(output_limit_bytes)
        out = _Pump(Channel.STDOUT, out_reader, allowance, emit)
        err = _Pump(Channel.STDERR, err_reader, allowance, emit)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(out.run()), tasks.create_task(err.run())]
                await child.wait()
                await _until_silent(running, (out, err))
        finally:
            await _end_group(child, term_seconds)
    code = child.returncode
    assert code is not None
    return Ended(
        exit_code=code if code >= 0 else -1,
        signal=-code if code < 0 else 0,
        stdout=bytes(out.tail),
        stderr=bytes(err.tail),
        dropped_bytes=allowance.dropped_bytes,
    )


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


async def _until_silent(running: Sequence[asyncio.Task[None]], pumps: Sequence[_Pump]) -> None:
    """Until both outputs have ended, or whoever else holds them open has said nothing for a while."""
    while True:
        before = sum(pump.moved for pump in pumps)
        _, open_still = await asyncio.wait(running, timeout=LINGER_SECONDS)
        if not open_still:
            return
        if sum(pump.moved for pump in pumps) == before and not any(pump.sending for pump in pumps):
            for task in open_still:
                task.cancel()
            return


async def _end_group(child: asyncio.subprocess.Process, term_seconds: float) -> None:
    """TERM, then KILL. A second cancellation while we wait means KILL now."""
    if not _signal_group(child.pid, signal.SIGTERM):
        await child.wait()
        return
    try:
        async with asyncio.timeout(term_seconds):
            await child.wait()
            while _signal_group(child.pid, 0):  # noqa: ASYNC110  # nobody announces a grandchild's end
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass
    finally:
        _signal_group(child.pid, signal.SIGKILL)
        if child.returncode is None:
            await asyncio.shield(child.wait())


def _signal_group(group: int, number: int) -> bool:
    """Whether anyone of the group was there to hear it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False  # gone, or another user's by now and not ours to end
    return True
