"""Watches over connections that end: both clients go on where they were."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fleetplane.client import connect, connect_sync
from fleetplane.kernel.errors import IntegrityError, PermissionDenied, Unavailable


def event(kind: str, name: str, mark: int) -> bytes:
    told = {"kind": "gpu", "metadata": {"name": name, "scope": "/", "revision": mark}, "spec": {}}
    identity = f"id: {mark}\n" if mark else ""
    return f"{identity}event: {kind}\ndata: {json.dumps(told)}\n\n".encode()


def bookmark(mark: int) -> bytes:
    return f"id: {mark}\nevent: bookmark\ndata: {{}}\n\n".encode()


class Cutting(ThreadingHTTPServer):
    """Answers each watch with the next of its streams, and cuts it there."""

    def __init__(self, streams: list[bytes | int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.streams = streams
        self.asked: list[str] = []

    @property
    def where(self) -> dict[str, Any]:
        return {"server": f"http://127.0.0.1:{self.server_address[1]}", "token": "t"}


class _Handler(BaseHTTPRequestHandler):
    server: Cutting

    def do_GET(self) -> None:
        self.server.asked.append(parse_qs(urlsplit(self.path).query).get("after", [""])[0])
        answer = self.server.streams.pop(0) if self.server.streams else 403
        if isinstance(answer, int):
            self.send_error(answer)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *_arguments: Any) -> None:  # noqa: A002  # as it is called there
        pass


@contextlib.contextmanager
def cutting(*streams: bytes | int) -> Iterator[Cutting]:
    with Cutting(list(streams)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(60)


CUT = (
    event("added", "a", 0) + bookmark(5) + event("modified", "a", 6),
    503,
    event("deleted", "a", 7),
    b'event: compacted\ndata: {"reason": "Compacted"}\n\n',
    event("added", "b", 0) + bookmark(9),
)
TOLD = [("added", "a"), ("modified", "a"), ("deleted", "a"), ("added", "b")]
ASKED = ["", "6", "6", "7", "", "9"]


def test_a_watch_without_an_event_loop_goes_on_where_it_was() -> None:
    told = []
    with cutting(*CUT) as server, connect_sync(**server.where) as fleet:
        with contextlib.suppress(PermissionDenied):  # how the last connection is answered
            for one in fleet.gpus.watch():
                told.append((one.type, one.object.name))  # noqa: PERF401  # until it raises
        assert told == TOLD
        assert server.asked == ASKED


async def test_a_watch_with_an_event_loop_goes_on_where_it_was() -> None:
    told = []
    with cutting(*CUT) as server:
        async with connect(**server.where) as fleet, contextlib.aclosing(fleet.gpus.watch()) as changes:
            with contextlib.suppress(PermissionDenied):  # how the last connection is answered
                async for one in changes:
                    told.append((one.type, one.object.name))  # noqa: PERF401  # until it raises
        assert (told, server.asked) == (TOLD, ASKED)


async def test_the_first_connection_must_succeed() -> None:
    with cutting(503) as server, connect_sync(**server.where) as fleet, pytest.raises(Unavailable):
        next(fleet.gpus.watch())
    with cutting(503) as server:
        async with connect(**server.where) as there, contextlib.aclosing(there.gpus.watch()) as changes:
            with pytest.raises(Unavailable):
                await anext(changes)


async def test_a_line_without_end_is_not_taken_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transport", "aio"):
        monkeypatch.setattr(f"fleetplane.client.{module}.EVENT_LIMIT_BYTES", 1000)
    endless = b"data: " + b"x" * 5000
    with cutting(endless) as server, connect_sync(**server.where) as fleet, pytest.raises(IntegrityError):
        next(fleet.gpus.watch())
    with cutting(endless) as server:
        async with connect(**server.where) as there, contextlib.aclosing(there.gpus.watch()) as changes:
            with pytest.raises(IntegrityError):
                await anext(changes)
