"""The only task that writes to a stream.

gRPC takes the cancellation of a write for the wish to end the whole call. Work is cancelled all the time, and
often while its output waits to be sent; so senders only wait here, and one task writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import grpc
import grpc.aio

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.node.link import LinkLost, ending

QUEUE_LIMIT: Final = 64
"""Messages. Each sender has one here at a time, so that a server which does not read holds all of them up."""

M = TypeVar("M")


class StreamWriter(Generic[M]):
    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[M, Any],
        translate: Callable[[grpc.aio.AioRpcError], FleetplaneError],
    ) -> None:
        """`translate` makes an error of the domain's from how the stream ended."""
        self._call = call
        self._translate = translate
        self._queue: asyncio.Queue[tuple[M, asyncio.Future[None]]] = asyncio.Queue(QUEUE_LIMIT)
        self._ended = False

    def __repr__(self) -> str:
        return f"<StreamWriter waiting={self._queue.qsize()} ended={self._ended}>"

    async def run(self) -> None:
        """Until the stream breaks, which raises how it ended, or until cancelled.

        gRPC does not tell how, only that, where a write was waiting for the server to read: LinkLost then.
        """
        try:
            while True:
                message, written = await self._queue.get()
                await self._pass_on(message, written)
        finally:
            self._ended = True
            self._let_go()

    async def first(self, message: M) -> None:
        """Write the message that opens the stream, before `run`. Raises how the stream ended."""
        await self._write(message)

    async def send(self, message: M) -> None:
        """Wait until it is on its way. Raises LinkLost. Whoever stops waiting does not take it back."""
        if self._ended:
            raise LinkLost("the stream has ended")
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put((message, written))
        if self._ended:  # while we waited for room, as others may still do
            self._let_go()
            raise LinkLost("the stream has ended")
        await written

    def _let_go(self) -> None:
        """Fail whoever waits for a write; each that goes makes room for one who waits for that."""
        while not self._queue.empty():
            _, waiting = self._queue.get_nowait()
            _fail(waiting)

    async def _pass_on(self, message: M, written: asyncio.Future[None]) -> None:
        try:
            await self._write(message)
        finally:
            if not written.done():
                if self._call.done():
                    _fail(written)
                else:
                    written.set_result(None)

    async def _write(self, message: M) -> None:
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error) from error
        except asyncio.InvalidStateError as error:
            raise self._translate(await ending(self._call)) from error


def _fail(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_exception(LinkLost("the stream has ended"))
        waiting.exception()  # whoever waited may be gone
