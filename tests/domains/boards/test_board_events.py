"""`/ws`: both dialects, over a real listener, from real changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import websockets
from prometheus_client import CollectorRegistry
from support.boards.board_node_rig import configured, node_rig
from support.boards.boards_rig import BOSS, BoardsRig, until
from support.boards.boards_web import BoardsWeb
from websockets.asyncio.client import ClientConnection
from websockets.typing import Subprotocol

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, BoardState, ClusterSpec
from fleetplane.domains.boards.live import socket as event_feed
from fleetplane.domains.boards.live.events import SentStates
from fleetplane.domains.boards.live.socket import SOCKETS_PER_CALLER, EventsSocket
from fleetplane.domains.boards.pins.kinds import Direction, GpioSpec
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.events import Event, EventType
from fleetplane.rpc import ListenerSpec, open_listener
from fleetplane.web.ops import OpsApp
from fleetplane.web.sockets import conversation

DEADLINE_SECONDS = 60.0
Json = dict[str, Any]


class Client:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, kind: str, payload: Any = None, **more: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, "payload": payload, **more}))

    async def next(self) -> Json:
        async with asyncio.timeout(DEADLINE_SECONDS):
            heard = json.loads(await self.socket.recv())
        assert isinstance(heard, dict)
        return heard

    async def until(self, kind: str, fits: Callable[[Json], bool] = lambda _one: True) -> Json:
        while True:
            heard = await self.next()
            if heard["type"] == kind and fits(heard):
                return heard

    async def settled(self) -> None:
        """Everything said before this was taken."""
        await self.say("ping", request_id="settled")
        await self.until("pong", lambda one: one.get("request_id") == "settled")

    async def closed(self) -> int:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.socket.wait_closed()
        assert self.socket.close_code is not None
        return self.socket.close_code


@dataclass(slots=True, kw_only=True)
class Place:
    rig: BoardsRig
    web: BoardsWeb
    address: str
    stack: AsyncExitStack

    async def open(self, path: str = "/ws", *, token: str | None = "viewer", **options: Any) -> Client:
        headers = {"authorization": f"Bearer {self.web.token(token)}"} if token else {}
        connection = websockets.connect(
            f"{self.address}{path}", additional_headers=headers, open_timeout=DEADLINE_SECONDS, **options
        )
        return Client(await self.stack.enter_async_context(connection))

    async def events(self) -> Client:
        client = await self.open("/ws?v=events")
        await client.settled()
        return client

    async def envelope(self, *topics: str) -> Client:
        client = await self.open()
        for topic in topics:
            await client.say("subscribe", {"topic": topic})
        await client.settled()
        return client


@pytest.fixture
async def place(rig: BoardsRig, web: BoardsWeb) -> AsyncIterator[Place]:
    front = OpsApp(CollectorRegistry(), version="0")
    front.mount(rig.domain.routes)
    spec = ListenerSpec(name="web", addresses=("127.0.0.1:0",), app=front, http1=True)
    async with open_listener(spec, grace_seconds=1) as listener, AsyncExitStack() as stack:
        address = listener.addresses[0].replace("http", "ws", 1)
        yield Place(rig=rig, web=web, address=address, stack=stack)


# The documented dialect.


async def test_the_life_of_a_board_is_told_in_dotted_words(place: Place) -> None:
    boards, clusters = place.rig.core.boards, place.rig.core.clusters
    client = await place.events()
    await clusters.create(ClusterSpec(name="lab"), actor=BOSS)
    await boards.create(BoardFacts(name="pi-1", ip_address="10.0.0.1"), actor=BOSS)
    heard = await client.until("node.discovered")
    assert heard["data"] == {"node_id": 1, "ip_address": "10.0.0.1", "name": "pi-1", "status": "discovered"}
    assert set(heard) == {"type", "timestamp", "data"}

    await boards.update(1, BoardFacts(cluster_id=1), actor=BOSS, declared=BoardState.READY)
    heard = await client.until("node.status.changed")
    assert (heard["data"]["status"], heard["data"]["previous_status"]) == ("ready", "discovered")
    heard = await client.until("cluster.node.added")
    assert (heard["cluster_id"], heard["data"]["node_id"], heard["data"]["status"]) == (1, 1, "ready")
    await boards.update(1, BoardFacts(cluster_id=0), actor=BOSS)
    heard = await client.until("cluster.node.removed")
    assert heard["data"]["cluster_id"] == 1
    await boards.delete(1, actor=BOSS)
    assert (await client.until("node.removed"))["data"] == {"node_id": 1}


async def test_the_documented_dialect_can_be_offered_as_a_subprotocol(place: Place) -> None:
    client = await place.open(subprotocols=[Subprotocol("events")])
    assert client.socket.subprotocol == "events"
    await client.settled()
    await place.rig.core.boards.create(BoardFacts(name="pi-1"), actor=BOSS)
    assert (await client.until("node.discovered"))["data"]["node_id"] == 1


async def test_a_pin_and_a_log_are_told_from_a_real_board(place: Place, tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text("")
    config = configured(logs={"files": {"app": str(tmp_path / "app.log")}})
    dotted, enveloped = await place.events(), await place.envelope("gpio")
    async with node_rig(tmp_path, place.rig, config=config) as node:
        await until(lambda: status_of(place.rig.board(1)).port == node.ports.agent_port)
        spec = GpioSpec(name="lamp", board=1, pin=17, direction=Direction.OUTPUT)
        await place.rig.domain.nodes.devices.create(spec, actor=BOSS)
        await place.web.post("/gpio/1/write", {"value": 1}, status=200)
        heard = await dotted.until("gpio.state.changed")
        assert (heard["resource"], heard["data"]["pin"], heard["data"]["state"]) == ("lamp", 17, "high")
        reading = (await enveloped.until("gpio_reading"))["payload"]
        assert {name: reading[name] for name in ("device_id", "node_id", "pin", "value")} == {
            "device_id": 1,
            "node_id": 1,
            "pin": 17,
            "value": 1.0,
        }

        await dotted.say("subscribe", {"topic": "logs", "node_id": 1, "sources": ["file:app"]})
        await dotted.settled()

        async def writing() -> None:
            while True:
                with (tmp_path / "app.log").open("a") as file:
                    file.write("the kettle boils\n")
                await asyncio.sleep(0.1)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(writing())
            heard = await dotted.until(
                "system.log.created", lambda one: "kettle" in str(one["data"]["message"])
            )
            task.cancel()
        assert (heard["data"]["node_id"], heard["data"]["source"]) == (1, "file:app")
        await dotted.say("unsubscribe", {"topic": "logs", "node_id": 1})
        await dotted.settled()


# The envelope of known clients.


async def test_known_clients_are_greeted_and_answered(place: Place) -> None:
    client = await place.open()
    assert (await client.next())["type"] == "pong"
    await client.say("ping", request_id="r1")
    heard = await client.next()
    assert (heard["type"], heard["request_id"]) == ("pong", "r1")


async def test_known_clients_hear_the_topics_they_asked_for(place: Place) -> None:
    boards, clusters = place.rig.core.boards, place.rig.core.clusters
    nodes, both = await place.envelope("nodes"), await place.envelope("clusters", "nodes")
    await clusters.create(ClusterSpec(name="lab"), actor=BOSS)
    await boards.create(BoardFacts(name="pi-1", ip_address="10.0.0.1", cluster_id=1), actor=BOSS)
    heard = (await nodes.next())["payload"]
    assert {name: heard[name] for name in ("node_id", "name", "status", "ip_address")} == {
        "node_id": 1,
        "name": "pi-1",
        "status": "discovered",
        "ip_address": "10.0.0.1",
    }
    first = (await both.until("cluster_status"))["payload"]
    assert (first["name"], first["status"], first["nodes_total"]) == ("lab", "pending", 0)
    await boards.declare(1, BoardState.READY, actor=BOSS)
    heard = await both.until("cluster_status", lambda one: one["payload"]["nodes_ready"] == 1)
    assert heard["payload"]["nodes_total"] == 1

    await both.say("unsubscribe", {"topic": "nodes"})
    await both.settled()
    await boards.declare(1, BoardState.MAINTENANCE, actor=BOSS)
    assert (await both.next())["type"] == "cluster_status"


async def test_the_server_tells_of_itself_to_who_asks(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "SYSTEM_SECONDS", 0.05)
    client = await place.envelope("system")
    feed = place.rig.domain.rest.feed
    async with asyncio.TaskGroup() as tasks:
        measuring = tasks.create_task(feed._measure())
        heard = (await client.until("system_metrics"))["payload"]
        measuring.cancel()
    assert heard["memory_usage"] > 0
    assert heard["goroutines"] > 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '"x"',
        '{"type":"dance"}',
        '{"type":"subscribe"}',
        '{"type":"auth"}',
        "{}",
        " " * 20_000,
        '{"type":"subscribe","payload":{"topic":"x"}}',
        '{"type":"subscribe","payload":{"topic":"logs"}}',
    ],
)
async def test_what_means_nothing_is_answered_with_an_error(place: Place, text: str) -> None:
    client = await place.envelope()
    await client.socket.send(text)
    heard = await client.next()
    assert (heard["type"], heard["payload"]["code"]) == ("error", 400)
    await client.settled()


async def test_one_who_only_errs_is_shown_out(place: Place) -> None:
    client = await place.envelope()
    for _ in range(conversation.ERRORS_LIMIT):
        await client.say("dance")
    assert await client.closed() == 1008


# Who may listen.


async def test_without_a_token_nothing_is_heard_until_one_is_shown(place: Place) -> None:
    client = await place.open(token=None)
    assert (await client.next())["type"] == "pong"
    await client.say("subscribe", {"topic": "nodes"})
    heard = await client.next()
    assert (heard["type"], heard["payload"]["code"]) == ("error", 401)
    await client.say("auth", {"token": "wrong"})
    assert (await client.next())["payload"]["success"] is False

    await client.say("auth", {"token": place.web.token("operator")}, request_id="a")
    heard = await client.next()
    assert heard["payload"] == {
        "success": True,
        "user_id": "operator/boss",
        "role": "operator",
        "message": "welcome",
    }
    assert heard["request_id"] == "a"
    await client.say("subscribe", {"topic": "nodes"})
    await client.settled()
    await place.rig.core.boards.create(BoardFacts(name="pi-1"), actor=BOSS)
    assert (await client.next())["type"] == "node_status"


async def test_one_who_shows_no_token_in_time_is_shown_out(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventsSocket, "token_seconds", 0.0)
    monkeypatch.setattr(conversation, "RECHECK_SECONDS", 0.05)
    client = await place.open(token=None)
    assert await client.closed() == 4401


async def test_a_token_can_stand_in_the_address(place: Place) -> None:
    client = await place.open(f"/ws?token={place.web.token('viewer')}&v=events", token=None)
    await client.settled()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/ws?token=wrong", {}, 401),
        ("/ws", {"authorization": "Basic abc"}, 401),
        ("/ws", {"origin": "https://evil.example"}, 403),
    ],
)
async def test_a_handshake_that_may_not_be_is_refused_in_http(
    place: Place, path: str, headers: dict[str, str], status: int
) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(f"{place.address}{path}", additional_headers=headers):
            pass
    assert refused.value.response.status_code == status
    assert json.loads(refused.value.response.body)["message"]


async def test_http_is_told_that_this_is_no_page(place: Place) -> None:
    assert (await place.web.http.get("/ws")).status_code == 400


async def test_a_token_for_something_else_hears_nothing(place: Place) -> None:
    foreign = place.web.token("viewer", scope="tenant/acme")
    client = await place.open(f"/ws?v=events&token={foreign}", token=None)
    assert await client.closed() == 4403


async def test_logging_out_ends_what_the_login_listens_to(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "RECHECK_SECONDS", 0.05)
    body = {"username": "ann", "password": "correct horse battery"}
    await place.web.post("/auth/register", body)
    token = (await place.web.post("/auth/login", body, status=200, role=None))["access_token"]
    client = await place.open(f"/ws?v=events&token={token}", token=None)
    await client.settled()
    await place.web.post("/auth/logout", status=200, token=token)
    assert await client.closed() == 4401


async def test_one_caller_has_so_many_sockets_and_no_more(place: Place) -> None:
    for _ in range(SOCKETS_PER_CALLER):
        await place.open()
    with pytest.raises(websockets.InvalidStatus) as refused:
        await place.open()
    assert refused.value.response.status_code == 429


async def test_a_server_that_stops_tells_its_listeners_to_come_back(place: Place) -> None:
    client = await place.events()
    place.rig.domain.rest.drain()
    assert await client.closed() == 1012
    with pytest.raises(websockets.InvalidStatus):
        await place.open()


# Slowness, and what is no news.


@pytest.mark.parametrize(("path", "kind"), [("/ws?v=events", "events.missed"), ("/ws", "error")])
async def test_a_listener_that_missed_something_is_told_how_much(place: Place, path: str, kind: str) -> None:
    client = await place.open(path)
    await client.settled()
    (socket,) = place.rig.domain.rest.events._sockets
    assert isinstance(socket, EventsSocket)
    socket._mailbox.missed = 7
    socket._mailbox.bell.set()
    assert "7 messages" in str(await client.until(kind))


async def test_a_report_that_changes_nothing_is_no_news(rig: BoardsRig) -> None:
    memory = SentStates()
    await rig.core.boards.create(BoardFacts(name="pi-1"), actor=BOSS)
    board = rig.store.get(BOARD, SCOPE, "1")
    assert board is not None
    memory.prime([board])
    again = Event(type=EventType.MODIFIED, resource=board, revision=9)
    assert list(memory.events_of(again)) == []
