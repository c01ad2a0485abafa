"""An ASGI server made of lists: hands an application a request and keeps what it sends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

GRPC_HEADERS = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]


@dataclass
class Answer:
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(self.events[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.events[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.events)

    @property
    def trailers_only(self) -> bool:
        return b"grpc-status" in self.headers

    @property
    def trailers(self) -> dict[bytes, bytes]:
        if self.trailers_only:
            return self.headers
        return dict(self.events[-1].get("headers", ()))

    @property
    def code(self) -> int:
        return int(self.trailers[b"grpc-status"])

    @property
    def message(self) -> str:
        return self.trailers.get(b"grpc-message", b"").decode()


def scope(path: str, headers: list[tuple[bytes, bytes]] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "2",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "headers": GRPC_HEADERS if headers is None else headers,
        "client": ("127.0.0.1", 4711),
        "server": ("127.0.0.1", 50051),
        "extensions": {"http.response.trailers": {}},
        **changes,
    }


async def drive(
    app: Any, scope: dict[str, Any], *chunks: bytes, stays: bool = True, ends: bool = True
) -> Answer:
    """Run one request. The client stays until the end, unless told otherwise."""
    events: list[dict[str, Any]] = [
        {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
    ]
    if ends:
        events.append({"type": "http.request"})
    if not stays:
        events.append({"type": "http.disconnect"})
    answer = Answer()

    async def receive() -> dict[str, Any]:
        if events:
            return events.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(event: dict[str, Any]) -> None:
        answer.events.append(event)

    async with asyncio.timeout(60):
        await app(scope, receive, send)
    return answer
