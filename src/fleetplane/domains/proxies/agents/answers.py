"""What an agent shows, on its way from the server that has the agent to the one that asked.

It may hold secrets, so it is nobody's record: it is sealed under the master key, read once and deleted. On a
database file, and where the agent is connected to the server that asked, it never leaves memory.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from typing import Final, NoReturn

import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

PREFIX: Final = "proxies/answer/"
ACTOR: Final = "system/answers"
KEEP_SECONDS: Final = 600.0
"""Longer than any command has to be answered: whoever asked has it by then, or is gone."""
SWEEP_SECONDS: Final = 300.0
PACKED_LIMIT_BYTES: Final = 1024 * 1024 - 1024
"""What a secret may hold, sealed."""
SMALL_BYTES: Final = 16 * 1024


class CommandAnswers:
    def __init__(self, store: Store, clock: Clock, master: MasterKey) -> None:
        self._store = store
        self._clock = clock
        self._master = master

    def __repr__(self) -> str:
        return f"<Answers {'shared' if self._store.shared else 'in memory'}>"

    async def pass_on(self, command: Command, text: str) -> None:
        """Keep what the one target of a command shows for the server that asked, unless it is too large."""
        name = _secret(command)
        packed = await _worked(zlib.compress, text.encode())
        if len(packed) > PACKED_LIMIT_BYTES:
            log.warning("proxies.answer_too_large", command=command.name, packed_bytes=len(packed))
            return
        await self._store.put_secret(name, self._master.seal(packed, purpose=name), actor=ACTOR)

    async def given(self, command: Command) -> str:
        """What was passed on, once; empty if nothing was."""
        name = _secret(command)
        sealed = await self._store.get_secret(name)
        if sealed is None:
            return ""
        await self._store.delete_secret(name, actor=ACTOR)
        packed = self._master.open(sealed, purpose=name)
        return (await _worked(zlib.decompress, packed)).decode(errors="replace")

    async def run_for_all(self) -> NoReturn:
        """Delete what nobody asked for any more, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            try:
                await self._sweep()
            except FleetplaneError as error:
                log.warning("proxies.answers_not_swept", error=error.message)

    async def _sweep(self) -> None:
        before_ns = self._store.clock.now_ns() - round(KEEP_SECONDS * NS)
        for name in await self._store.secret_names(PREFIX):
            issued, _, _ = name.removeprefix(PREFIX).partition("/")
            if not issued.isdecimal() or int(issued) < before_ns:
                await self._store.delete_secret(name, actor=ACTOR)


async def _worked(work: Callable[[bytes], bytes], data: bytes) -> bytes:
    """Off the event loop, where it takes long enough to be worth it."""
    return work(data) if len(data) <= SMALL_BYTES else await asyncio.to_thread(work, data)


def _secret(command: Command) -> str:
    return f"{PREFIX}{command.created_at_ns}/{command.name}"
