"""Answers that go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from fleetplane.web import streaming
from fleetplane.web.streaming import Streaming, event


class Reader:
    """The other end of an ASGI application."""

    def __init__(self) -> None:
        self.got: list[MutableMapping[str, Any]] = []
        self.left = asyncio.Event()
        self.body = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.got.append(message)
        if message["type"] == "http.response.body":
            self.body.set()

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.got)


async def two() -> AsyncGenerator[bytes]:
    yield b"one"
    yield b"two"


async def test_what_comes_is_passed_on_until_there_is_no_more() -> None:
    reader = Reader()
    await Streaming(200, {"x-run": "7"}, "text/plain", two())({}, reader.receive, reader.send)
    assert reader.text == b"onetwo"
    assert (b"x-run", b"7") in reader.got[0]["headers"]
    assert not reader.got[-1].get("more_body")


async def test_a_source_is_closed_when_its_reader_leaves() -> None:
    closed = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes]:
        try:
            yield b"hello"
            await asyncio.Event().wait()
        finally:
            closed.set()

    reader = Reader()
    serving = asyncio.create_task(
        Streaming(200, {}, "text/plain", endless())({}, reader.receive, reader.send)
    )
    await reader.body.wait()
    reader.left.set()
    async with asyncio.timeout(60):
        await serving
    assert closed.is_set()


async def test_an_idle_stream_says_that_it_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.01)

    async def silent() -> AsyncGenerator[bytes]:
        await reader.body.wait()
        yield b"at last"

    reader = Reader()
    await Streaming(200, {}, streaming.EVENT_STREAM, silent())({}, reader.receive, reader.send)
    assert reader.text.startswith(streaming.KEEP_ALIVE)
    assert reader.text.endswith(b"at last")


def test_an_event_is_one_block_whatever_is_in_it() -> None:
    block = event("result", {"text": "a\nb\r\n\u2028"}, mark="3")
    lines = block.decode().split("\n")
    assert lines[:2] == ["id: 3", "event: result"]
    assert json.loads(lines[2].removeprefix("data: ")) == {"text": "a\nb\r\n\u2028"}
    assert lines[3:] == ["", ""]
