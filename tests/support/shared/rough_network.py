"""A TCP proxy for a network that stalls, drops and repeats what it carries, or carries nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Roughness:
    """How likely each thing happens to a chunk of bytes."""

    drop: float = 0.0
    stall: float = 0.0
    repeat: float = 0.0
    """On the way up; a repeated chunk that ends where a frame does is one that its reader understands."""
    repeat_down: float = 0.0
    stall_seconds: float = 0.5
    delay_seconds: float = 0.0
    """Of every chunk."""


@dataclass(slots=True)
class RoughNetwork:
    """Where to dial, and what happens on the way."""

    upstream: str
    roughness: Roughness = field(default_factory=Roughness)
    random: random.Random = field(default_factory=lambda: random.Random(7))
    done: Counter[str] = field(default_factory=Counter)
    address: str = ""
    is_cut: bool = False
    hold_after_bytes: float = math.inf
    """Of what comes down: then nothing is carried any more, as if who reads had been stopped."""
    _flows: asyncio.Event = field(default_factory=asyncio.Event)
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _carriers: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        """End every connection, and turn away new ones until `heal`."""
        self.is_cut = True
        self._flows.set()
        self.cut_all()

    def hold(self) -> None:
        """Carry nothing until `heal`, not even that an end is gone: what was sent arrives then."""
        self._flows.clear()

    def heal(self) -> None:
        self.is_cut = False
        self._flows.set()

    def cut_all(self) -> None:
        """Every connection at once, as when a cable is pulled by both ends' kernels noticing."""
        for writer in tuple(self._open):
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        self._open.add(writer)  # at once: one that is still being carried on is cut as well
        carrier = asyncio.ensure_future(self._carry(reader, writer))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.upstream.rpartition(":")
        try:
            await self._flows.wait()
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
        except BaseException as error:
            self._open.discard(writer)
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        both = (writer, up_writer)
        self._open.update(both)
        pumps = [
            asyncio.ensure_future(self._pump(reader, up_writer, down=False)),
            asyncio.ensure_future(self._pump(up_reader, writer, down=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in both:
                self._open.discard(end)
                end.transport.abort()
            await asyncio.wait(pumps)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, down: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := await self._next(reader):
                if down:
                    self.hold_after_bytes -= len(chunk)
                    if self.hold_after_bytes < 0:
                        self.hold()
                fate, rough = self.random.random(), self.roughness
                if fate < rough.drop:
                    self.done["dropped"] += 1
                    return
                if fate < rough.drop + rough.stall:
                    self.done["stalled"] += 1
                    await asyncio.sleep(rough.stall_seconds)
                elif fate < rough.drop + rough.stall + (rough.repeat_down if down else rough.repeat):
                    self.done["repeated"] += 1
                    writer.write(chunk)
                writer.write(chunk)
                await writer.drain()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        try:
            chunk = await reader.read(65_536)
        except OSError:
            chunk = b""
        await self._flows.wait()
        if self.roughness.delay_seconds:
            await asyncio.sleep(self.roughness.delay_seconds)
        return b"" if self.is_cut else chunk


@asynccontextmanager
async def rough_network(upstream: str = "") -> AsyncIterator[RoughNetwork]:
    network = RoughNetwork(upstream)
    server = await asyncio.start_server(network._accept, "127.0.0.1", 0)
    network.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
    try:
        yield network
    finally:
        server.close()
        for carrier in network._carriers:
            carrier.cancel()
        if network._carriers:
            await asyncio.wait(network._carriers)
