"""Handing a message to a transport from outside the call's own task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from typing import Any

from fleetplane.rpc.serving.connection import Shared, push
from fleetplane.rpc.serving.framing import Framed

EVENT = {"type": "http.response.body"}


class Steps:
    """An awaitable that is its own iterator, and is done after so many steps."""

    def __init__(self, *pending: Any) -> None:
        self._pending = list(pending)

    def __await__(self) -> Generator[Any, None, None]:
        return self  # type: ignore[return-value]

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        if not self._pending:
            raise StopIteration
        return self._pending.pop(0)


def test_nothing_is_left_to_await_when_the_transport_has_room() -> None:
    assert push(lambda _event: Steps(), EVENT) is None


async def test_a_transport_without_room_is_awaited_by_the_call() -> None:
    room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = push(lambda _event: room, EVENT)
    assert left is room


async def test_a_transport_that_sends_when_awaited_is_left_to_the_call() -> None:
    sent = []

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    left = push(send, EVENT)
    assert sent == []
    assert left is not None
    await left
    assert sent == [EVENT]


async def test_an_awaitable_is_continued_where_the_push_left_it() -> None:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[None] = loop.create_future()
    first._asyncio_future_blocking = True
    left: Awaitable[None] | None = push(lambda _event: Steps(first, None), EVENT)
    assert left is not None
    waiting = asyncio.ensure_future(left)
    await asyncio.sleep(0)
    assert not waiting.done()
    first.set_result(None)
    async with asyncio.timeout(60):
        await waiting


async def test_a_shared_message_knows_the_answer_of_a_transport_that_took_it() -> None:
    done, room = Steps(), asyncio.get_running_loop().create_future()
    shared = Shared(Framed(b"news"))
    assert shared.taken is not done
    assert shared.pushed(done) is None
    assert shared.taken is done
    assert shared.pushed(room) is room
    assert shared.taken is done


async def test_a_shared_message_is_not_taken_by_a_transport_that_waits() -> None:
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    first._asyncio_future_blocking = True
    shared = Shared(Framed(b"news"))
    sending = Steps(first)
    left = shared.pushed(sending)
    assert left is not None
    assert shared.taken is not sending
    first.set_result(None)
    async with asyncio.timeout(60):
        await left
