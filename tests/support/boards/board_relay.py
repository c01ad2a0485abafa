"""A stretch of network between two programs that can be cut and mended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from support.shared.free_ports import free_port

from fleetplane.domains.boards.agent import registration as link


class Relay:
    """A stretch of network that can be cut."""

    def __init__(self) -> None:
        self.address = ""
        self._target = ""
        self._listening: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def to(self, target: str) -> AsyncIterator[None]:
        self._target = target
        await self.mend()
        try:
            yield
        finally:
            await self.cut()

    async def mend(self) -> None:
        # One that stays ours while nobody listens at it.
        port = int(self.address.rpartition(":")[2]) if self.address else free_port()
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    async def cut(self) -> None:
        assert self._listening is not None
        self._listening.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = link.endpoint(self._target)
        self._writers.add(writer)
        try:
            onward_reader, onward = await asyncio.open_connection(host, port)
        except BaseException:
            self._writers.discard(writer)
            writer.transport.abort()
            raise
        self._writers.add(onward)
        try:
            if writer.transport.is_closing():  # cut meanwhile
                return
            with contextlib.suppress(OSError):
                await asyncio.gather(_pour(reader, onward), _pour(onward_reader, writer))
        finally:
            self._writers -= {writer, onward}
            for end in (writer, onward):
                end.transport.abort()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
