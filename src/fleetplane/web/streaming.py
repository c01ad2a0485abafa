"""Answers that go on: bytes as they come, until there are no more or the reader has left.

Server-sent events are one use of it. An idle stream says something every few seconds, so that
what stands in between does not take it for dead, and so that a reader who left is noticed. Whether the
reader may still read is checked along the way: a token may be revoked, and a right taken back, meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from litestar.response.base import ASGIResponse

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.web.rest.gateway import Receive, Send

KEEP_ALIVE_SECONDS = 15.0
CHECK_SECONDS = 1.0
"""For how long a reader who was let in is not asked again."""
KEEP_ALIVE = b": still here\n\n"
EVENT_STREAM = "text/event-stream"


def event(kind: str, data: object, *, mark: str = "") -> bytes:
    """One server-sent event; without a kind, only its data. With its mark a reader may go on after it."""
    lines = [f"id: {mark}"] if mark else []
    if kind:
        lines.append(f"event: {kind}")
    lines.append(f"data: {msgspec.json.encode(data).decode()}")  # JSON has no line breaks of its own
    return ("\n".join(lines) + "\n\n").encode()


class Streaming(ASGIResponse):
    def __init__(
        self,
        status: int,
        headers: Mapping[str, str],
        content_type: str,
        chunks: AsyncGenerator[bytes],
        *,
        check: Callable[[], object] | None = None,
    ) -> None:
        """`check` raises once the reader may not read on; the stream then ends, and the reader learns why
        when it comes back."""
        self.status_code = status
        self.given = {"content-type": content_type, "cache-control": "no-store", **headers}
        self._chunks = chunks
        self._check = check

    async def __call__(self, _scope: object, receive: Receive, send: Send) -> None:  # type: ignore[override]
        headers = [(name.encode(), value.encode()) for name, value in self.given.items()]
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await self._pass_on(send, leaving)
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await self._chunks.aclose()

    async def _pass_on(self, send: Send, leaving: asyncio.Future[None]) -> None:
        coming = asyncio.ensure_future(anext(self._chunks, None))
        loop = asyncio.get_running_loop()
        checked = loop.time()
        try:
            while True:
                either: set[asyncio.Future[Any]] = {coming, leaving}
                done, _ = await asyncio.wait(
                    either, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving in done:
                    return
                chunk = coming.result() if done else KEEP_ALIVE
                if loop.time() - checked >= CHECK_SECONDS:
                    chunk, checked = chunk if self._may_read() else None, loop.time()
                if chunk is None:
                    await send({"type": "http.response.body", "body": b""})
                    return
                if done:
                    coming = asyncio.ensure_future(anext(self._chunks, None))
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

    def _may_read(self) -> bool:
        try:
            if self._check is not None:
                self._check()
        except FleetplaneError:
            return False
        return True


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
