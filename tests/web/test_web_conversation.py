"""What every WebSocket has in common: when a token must come, bounded replies, ten errors, closing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, Unauthenticated
from fleetplane.web.sockets import conversation, door
from fleetplane.web.sockets.conversation import ERRORS_LIMIT, REPLIES_LIMIT, Conversation


@dataclass(frozen=True)
class Someone:
    name: str


class Wire:
    """Both ends of a socket: what the client sends, and what it was sent."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[str] = []
        self.code: int | None = None
        self.reads = asyncio.Event()
        self.reads.set()

    def say(self, **message: Any) -> None:
        self.incoming.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "websocket.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "websocket.close":
            self.code = message["code"]
        else:
            self.sent.append(message["text"])


class Echo(Conversation[Someone]):
    failure_event = "test.events_failed"
    token_seconds = 30.0
    token_comes_first = False

    def __init__(self, wire: Wire, *, token: str | None = "good") -> None:
        self.good = {"good"}
        self.open = False
        super().__init__(
            authenticate=self.who, clock=SystemClock(), receive=wire.receive, send=wire.send, token=token
        )

    def who(self, token: str) -> Someone:
        if token not in self.good:
            raise Unauthenticated("no such token")
        return Someone(token)

    @contextmanager
    def listening(self) -> Iterator[None]:
        self.open = True
        yield
        self.open = False

    async def act(self, message: dict[str, Any]) -> None:
        if "token" in message:
            self.token = message["token"]
        elif "break" in message:
            raise RuntimeError("a mistake of ours")
        elif "bad" in message:
            raise InvalidArgument("bad")
        self.reply(str(message.get("echo", "")))

    def refusal(self, error: FleetplaneError) -> str:
        return f"refused: {error.message}"

    async def send_events(self, _caller: Someone) -> bool:
        return False


@pytest.fixture
def wire() -> Wire:
    return Wire()


async def served(socket: Echo) -> None:
    async with asyncio.timeout(60):
        await socket.serve()


async def test_a_client_that_leaves_gets_its_replies_and_no_close(wire: Wire) -> None:
    wire.say(echo="a")
    wire.say(echo="b")
    socket = Echo(wire)
    task = asyncio.create_task(served(socket))
    async with asyncio.timeout(60):
        while len(wire.sent) < 2:
            await asyncio.sleep(0)
    assert socket.open
    wire.leave()
    await task
    assert (wire.sent, wire.code, socket.open) == (["a", "b"], None, False)


async def test_ten_refused_messages_end_the_socket(wire: Wire) -> None:
    for _ in range(ERRORS_LIMIT):
        wire.say(bad=True)
    await served(Echo(wire))
    assert wire.code == door.POLICY_VIOLATION


async def test_a_token_that_ends_closes_a_quiet_socket(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "RECHECK_SECONDS", 0.01)
    socket = Echo(wire)
    task = asyncio.create_task(served(socket))
    await asyncio.sleep(0)
    socket.good.clear()
    await task
    assert wire.code == door.TOKEN_ENDED


async def test_a_token_must_come_in_time(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Echo, "token_seconds", 0.02)
    await served(Echo(wire, token=None))
    assert wire.code == door.TOKEN_ENDED


async def test_where_the_token_comes_first_a_refused_message_ends_the_socket(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Echo, "token_comes_first", True)
    wire.say(bad=True)
    await served(Echo(wire, token=None))
    assert (wire.sent, wire.code) == ([], door.TOKEN_ENDED)


async def test_a_token_in_a_message_is_checked_before_anything_is_sent(wire: Wire) -> None:
    wire.say(token="wrong")
    await served(Echo(wire, token=None))
    assert (wire.sent, wire.code) == ([], door.TOKEN_ENDED)


async def test_a_client_that_asks_without_reading_is_not_read_from_any_further(wire: Wire) -> None:
    wire.reads.clear()
    for number in range(3 * REPLIES_LIMIT):
        wire.say(echo=number)
    task = asyncio.create_task(served(Echo(wire)))
    for _ in range(1000):
        await asyncio.sleep(0)
    assert wire.incoming.qsize() >= REPLIES_LIMIT
    wire.reads.set()
    async with asyncio.timeout(60):
        while len(wire.sent) < 3 * REPLIES_LIMIT:
            await asyncio.sleep(0)
    assert wire.sent == [str(number) for number in range(3 * REPLIES_LIMIT)]
    wire.leave()
    await task


async def test_an_error_of_ours_closes_the_socket_and_nothing_else(wire: Wire) -> None:
    wire.say(**{"break": True})
    await served(Echo(wire))
    assert wire.code == door.INTERNAL_ERROR
