"""What is said over a WebSocket is refused with words, however it is made."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import websockets
from support.shared.server_process import running_server

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.sockets.door import MESSAGE_LIMIT, decode_message

ADMIN, PASSWORD = "admin@example.com", "correct horse battery staple"
DEEP = "[" * 30_000
HOSTILE = {
    "deep lists": DEEP + "]" * 30_000,
    "deep objects": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "an end that never comes": DEEP,
    "a lone surrogate": '{"type":"\\ud800"}x',
    "no object": "[]",
    "nothing": "",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_messages_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument):
        decode_message({"type": "websocket.receive", "text": HOSTILE[name]})
    with pytest.raises(InvalidArgument):
        decode_message({"type": "websocket.receive", "bytes": HOSTILE[name].encode()})


def test_bytes_that_are_no_text_and_messages_without_end_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="not JSON"):
        decode_message({"type": "websocket.receive", "bytes": b'{"a":"\xff"}'})
    with pytest.raises(InvalidArgument, match="at most"):
        decode_message({"type": "websocket.receive", "text": "x" * (MESSAGE_LIMIT + 1)})


def test_a_deep_message_gets_an_answer_and_leaves_no_traceback(tmp_path: Path) -> None:
    arguments = ("--only", "proxies", "--set", f"proxies.admin_email={ADMIN}")
    with running_server(tmp_path, *arguments, admin_password=PASSWORD) as server:
        asyncio.run(_attack(server.web))
        assert "Traceback" not in server.log.read_text()
        assert {"warning", "error"}.isdisjoint(line["level"] for line in server.told())


async def _attack(web: str) -> None:
    async with httpx.AsyncClient(base_url=web) as client:
        answer = await client.post("/v1/auth/login", json={"email": ADMIN, "password": PASSWORD})
        token = answer.json()["access_token"]
    url = web.replace("http", "ws", 1) + f"/v1/events?token={token}"
    async with websockets.connect(url) as socket, asyncio.timeout(60):
        await socket.send(HOSTILE["deep lists"])
        while True:
            told = json.loads(await socket.recv())
            if told["type"] == "error":
                return
