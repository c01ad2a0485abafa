"""The one who writes to a stream.

gRPC takes the cancellation of a write for the wish to end the whole call. Commands are cancelled all
the time, and often while their output waits to be sent; so they only wait here, and one task writes.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
import grpc.aio

from fleetplane.domains.edge.agent.link import LinkLost

QUEUE_LIMIT: Final = 64
"""Messages. Each sender has one here at a time, so that a server which does not read holds all of them up."""


class Writer:
    def __init__(self, call: grpc.aio.StreamStreamCall[bytes, bytes]) -> None:
        self._call = call
        self._queue: asyncio.Queue[tuple[bytes, asyncio.Future[None]]] = asyncio.Queue(QUEUE_LIMIT)
        self._ended = False

    def __repr__(self) -> str:
        return f"<Writer waiting={self._queue.qsize()} ended={self._ended}>"

    async def run(self) -> None:
        """Until the stream breaks, which ends with LinkLost, or until cancelled."""
        try:
            while True:
                message, written = await self._queue.get()
                await self._write(message, written)
        finally:
            self._ended = True
            while not self._queue.empty():
                _, waiting = self._queue.get_nowait()
                _fail(waiting)

    async def _write(self, message: bytes, written: asyncio.Future[None]) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise LinkLost("the stream has ended") from error
        finally:
            if not written.done():
                if self._call.done():
                    _fail(written)
                else:
                    written.set_result(None)

    async def send(self, message: bytes) -> None:
        """Wait until it is on its way. Raises LinkLost. Giving up waiting does not call it back."""
        if self._ended:
            raise LinkLost("the stream has ended")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put((message, written))
        if self._ended:  # while we waited for room
            raise LinkLost("the stream has ended")
        await written


def _fail(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(LinkLost("the stream has ended"))
        waiting.exception()  # whoever waited may be gone
