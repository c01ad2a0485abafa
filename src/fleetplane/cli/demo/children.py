"""The processes of the demonstration: each in a session of its own, and ended by us, once.

Ctrl-C in a terminal is for whoever started everything, who asks each of them. Asked twice, a server would not
wait for its agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import IO

STOP_SECONDS = 60.0
"""After which a child that was asked to end is ended: a server waits 30 s for its agents."""
COMMAND = (sys.executable, "-m", "fleetplane.cli.main")


class Children:
    """Everything that was started, in order; what was started last ends first."""

    def __init__(self, log: IO[bytes], environment: Mapping[str, str]) -> None:
        self._log = log
        self._environment = environment
        self._running: list[asyncio.subprocess.Process] = []

    def __repr__(self) -> str:
        return f"<Children {[child.pid for child in self._running]}>"

    async def start(self, words: Sequence[str], **more: str) -> asyncio.subprocess.Process:
        """Start a command of `fleetplane` that goes on."""
        child = await asyncio.create_subprocess_exec(
            *COMMAND,
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**self._environment, **more},
        )
        self._running.append(child)
        return child

    async def ask(self, words: Sequence[str], *, given: str = "", **more: str) -> str | None:
        """What a command of `fleetplane` prints; None if it failed. What it complains about is logged."""
        child = await asyncio.create_subprocess_exec(
            *COMMAND,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**self._environment, **more},
        )
        try:
            out, _ = await child.communicate(given.encode())
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
            raise
        return out.decode().strip() if child.returncode == 0 else None

    async def stop(self) -> None:
        """End everything, the last first; the server, which is the first, when its agents are gone."""
        while self._running:
            await stop(self._running.pop())


async def stop(child: asyncio.subprocess.Process) -> None:
    """Ask a child to end, and wait for it."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await child.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
