from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from support.instances.agents_rig import BOSS, until
from support.proxies.events_rig import EventsRig, Listener, events_rig
from websockets.exceptions import ConnectionClosed, InvalidStatus

from fleetplane.domains.proxies.kinds.records import VIRTUAL_HOST, VirtualHostSpec
from fleetplane.domains.proxies.live.app import EventSocket
from fleetplane.domains.proxies.live.subscriptions import EventLimits
from fleetplane.fleet.feeds.ring import WHOLE
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.web.sockets import conversation


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[EventsRig]:
    async with events_rig(tmp_path) as rig:
        yield rig


async def closed(listener: Listener) -> tuple[int, str]:
    try:
        while True:
            await listener.next()
    except ConnectionClosed as ended:
        assert ended.rcvd is not None
        return ended.rcvd.code, ended.rcvd.reason


# Getting in.


async def test_a_token_in_the_query_lets_in(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    assert (await listener.ask(action="ping")) == {"type": "pong"}


async def test_a_token_in_the_header_lets_in(rig: EventsRig) -> None:
    token = await rig.member("ann")
    listener = await rig.listen(additional_headers={"Authorization": f"Bearer {token}"})
    assert (await listener.ask(action="ping"))["type"] == "pong"


async def test_a_token_in_the_first_message_lets_in(rig: EventsRig) -> None:
    listener = await rig.listen()
    answer = await listener.ask(action="authenticate", token=await rig.member("ann"))
    assert (answer["type"], answer["data"]["name"]) == ("authenticated", "user/ann")
    host = await rig.fleet.host("example.com")
    assert (await listener.event("virtual_host.created"))["data"]["virtual_host_id"] == host.name


async def test_a_bad_token_is_refused_at_the_handshake_with_the_usual_error(rig: EventsRig) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await rig.listen("guess")
    response = refused.value.response
    assert response.status_code == 401
    assert json.loads(response.body)["error"]["code"] == "UNAUTHORIZED"


@pytest.mark.parametrize("first", ["{}", "no json", '{"action":"authenticate","token":"guess"}'])
async def test_a_bad_first_message_ends_the_socket(rig: EventsRig, first: str) -> None:
    listener = await rig.listen()
    await listener.socket.send(first)
    assert (await closed(listener))[0] == 4401


async def test_no_first_message_ends_the_socket_too(rig: EventsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventSocket, "token_seconds", 0.1)
    assert await closed(await rig.listen()) == (4401, "a token is required")


async def test_foreign_pages_are_refused_and_our_own_let_in(rig: EventsRig) -> None:
    token = await rig.member("ann")
    with pytest.raises(InvalidStatus) as refused:
        await rig.listen(token, origin="https://evil.example")
    assert refused.value.response.status_code == 403
    await rig.listen(token, origin=rig.address.replace("ws", "http", 1))


async def test_a_caller_has_a_bounded_number_of_sockets(rig: EventsRig) -> None:
    token = await rig.member("ann")
    listeners = [await rig.listen(token) for _ in range(10)]
    with pytest.raises(InvalidStatus) as refused:
        await rig.listen(token)
    assert refused.value.response.status_code == 429
    await listeners[0].socket.close()
    await until(lambda: len(rig.app) == 9)
    await rig.listen(token)


async def test_how_many_sockets_there_may_be_is_a_setting(tmp_path: Path) -> None:
    async with events_rig(tmp_path, limits=EventLimits(sockets=2, sockets_per_caller=1)) as rig:
        ann, bob, cid = [await rig.member(name) for name in ("ann", "bob", "cid")]
        await rig.listen(ann)
        with pytest.raises(InvalidStatus) as refused:
            await rig.listen(ann)
        assert refused.value.response.status_code == 429
        await rig.listen(bob)
        with pytest.raises(InvalidStatus) as refused:
            await rig.listen(cid)
        assert refused.value.response.status_code == 503


async def test_plain_http_is_told_what_is_spoken_here(rig: EventsRig) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.get(rig.address.replace("ws", "http", 1) + "/v1/events")
    assert answer.status_code == 422


# What is told.


async def test_the_documented_events_of_an_agents_day(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    agent = await rig.fleet.agent("web-01")
    await agent.open()
    connected = await listener.event("agent.connected")
    data = {name: connected["data"][name] for name in ("agent_id", "hostname", "ip_address")}
    assert data == {"agent_id": agent.agent_id, "hostname": "web-01.internal", "ip_address": "10.0.1.10"}
    assert set(connected) == {"type", "timestamp", "data"}
    assert connected["data"]["workspace_id"] == rig.workspace

    await agent.health(system=pb.SystemMetrics(cpu_percent=85.0))
    alert = await listener.event("health.alert")
    for name, value in {
        "agent_id": agent.agent_id,
        "alert_id": "cpu_high",
        "severity": "warning",
        "message": "High CPU usage: 85%",
        "metric": "cpu_percent",
        "value": 85.0,
    }.items():
        assert alert["data"][name] == value
    update = await agent.next("config_update")
    await agent.status(update, "PENDING", "VALIDATING", "APPLYING", "SUCCESS")
    applied = await listener.event("config.applied")
    assert (applied["data"]["config_id"], applied["data"]["version"]) == (update.config_id, update.version)
    assert applied["data"]["success"] is True
    assert isinstance(applied["data"]["duration_ms"], int)

    agent.leave()
    gone = await listener.event("agent.disconnected")
    assert (gone["data"]["agent_id"], gone["data"]["reason"]) == (agent.agent_id, "stream_closed")


async def test_the_other_events_come_in_the_order_of_what_happened(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    agent = await rig.fleet.agent("web-01")
    await agent.open()
    await agent.health(running=False)
    update = await agent.next("config_update")
    await agent.status(update, "FAILED", error="no")
    await until(lambda: rig.fleet.deployment_states(agent.agent_id).get(1) == "failed")
    await agent.health()
    await until(lambda: rig.fleet.alerts(agent.agent_id) == {})
    host = await rig.fleet.host("example.com")
    await rig.fleet.hosts.delete(rig.fleet.scope, host.name, if_match=None, actor=BOSS)
    await rig.fleet.agents.delete(rig.fleet.scope, agent.agent_id, if_match=None, actor=BOSS)
    heard: list[str] = []
    while not heard or heard[-1] != "agent.deleted":
        heard.append((await listener.next())["type"])
    for kind in (
        "agent.registered",
        "agent.connected",
        "health.alert",
        "config.started",
        "config.applied",
        "health.resolved",
        "virtual_host.created",
        "virtual_host.deleted",
        "agent.deleted",
    ):
        assert kind in heard
    assert heard[:2] == ["agent.registered", "agent.connected"]
    assert heard.count("agent.connected") == 1


async def test_what_happened_on_an_agents_machine_and_what_was_set_aside_is_told(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    agent = await rig.fleet.agent("web-01")
    await agent.open()
    await agent.health(0)
    for identity, kind in (("e-1", "nginx.crashed"), ("e-2", "mine.own")):
        event = pb.Event(event_id=identity, event_type=kind, timestamp=1_700_000_000_000, data={"exit": "11"})
        await agent.send(event=event)
    crashed = await listener.event("nginx.crashed")
    assert {name: crashed["data"][name] for name in ("agent_id", "event_id", "occurred_at", "details")} == {
        "agent_id": agent.agent_id,
        "event_id": "e-1",
        "occurred_at": "2023-11-14T22:13:20Z",
        "details": {"exit": "11"},
    }
    other = await listener.event("agent.event")
    assert (other["data"]["event_type"], other["data"]["event_id"]) == ("mine.own", "e-2")

    update = await agent.next("config_update")
    aside = {"virtual_host/h-1": "[emerg] unknown directive in conf.d/host-h-1.conf:3"}
    status = pb.ConfigStatus(
        config_id=update.config_id, version=update.version, status="SUCCESS", set_aside=aside
    )
    await agent.send(config_status=status)
    applied = (await listener.event("config.applied"))["data"]
    assert (applied["success"], applied["set_aside"]) == (True, aside)


async def test_a_command_is_told_when_it_is_completed(rig: EventsRig) -> None:
    from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentVerb

    listener = await rig.listen(await rig.member("ann"))
    agent = await rig.fleet.agent("web-01")
    await agent.open()
    asked = asyncio.create_task(
        rig.fleet.side.commander.order(
            rig.fleet.stored(agent.agent_id), AgentOrder(verb=AgentVerb.RELOAD), actor=BOSS
        )
    )
    await agent.answer((await agent.next("command")).command_id, success=True, message="done")
    await asked
    told = (await listener.event("command.completed"))["data"]
    assert (told["agent_id"], told["command"], told["outcome"]) == (agent.agent_id, "reload", "ok")


async def test_nobody_hears_of_another_organization(rig: EventsRig) -> None:
    other = await rig.another_organization()
    stranger = await rig.listen(await rig.member("eve", organization=other.scope.split("/")[1]))
    mine = await rig.listen(await rig.member("ann"))
    await rig.fleet.host("secret.example")
    await other.host("theirs.example")
    assert (await stranger.next())["data"]["server_name"] == "theirs.example"
    assert (await mine.next())["data"]["server_name"] == "secret.example"

    answer = await stranger.ask(action="subscribe", events=["*"], filter={"workspace_id": rig.workspace})
    assert answer["data"]["code"] == "FORBIDDEN"
    unknown = await stranger.ask(action="subscribe", events=["*"], filter={"workspace_id": "no-such"})
    assert unknown["data"]["code"] == "FORBIDDEN", "as if there were none"


# Subscriptions.


async def test_subscriptions_choose_by_pattern_and_workspace(rig: EventsRig) -> None:
    token = await rig.member("ann")
    listener = await rig.listen(token)
    answer = await listener.ask(
        action="subscribe", events=["virtual_host.*"], filter={"workspace_id": rig.workspace}
    )
    assert answer["type"] == "subscription.updated"
    assert answer["data"]["events"] == ["virtual_host.*"]
    assert answer["data"]["filter"] == {"workspace_id": rig.workspace}
    agent = await rig.fleet.agent("web-01")
    await agent.open()
    await rig.fleet.host("example.com")
    assert (await listener.next())["type"] == "virtual_host.created"

    await listener.ask(action="unsubscribe", id=answer["data"]["id"])
    await rig.fleet.host("two.example")
    await rig.caught_up()
    assert (await listener.ask(action="ping"))["type"] == "pong", "nothing came before it"


async def test_what_one_asks_wrongly_is_told_and_ten_times_is_too_often(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    wrong = [
        "no json",
        "[]",
        '{"action":"dance"}',
        '{"action":"subscribe"}',
        '{"action":"subscribe","events":["age*nt"]}',
        '{"action":"subscribe","events":[1]}',
        '{"action":"subscribe","events":["*"],"filter":{"colour":"red"}}',
        '{"action":"resume","since":"yesterday"}',
        '{"action":"unsubscribe","id":"none"}',
    ]
    for text in wrong:
        await listener.socket.send(text)
        answer = await listener.next()
        assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR"), text
    await listener.socket.send("10")
    assert (await closed(listener))[0] == 1008


ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    10**30,
    1.5,
    "",
    "*",
    "sub-1",
    "\0",
    "x" * 300,
    [],
    [None],
    ["*"],
    ["a.*", {}],
    {},
    {"agent_id": "x"},
)


async def test_no_message_however_odd_breaks_the_socket(rig: EventsRig) -> None:
    token = await rig.member("ann")
    source = random.Random(1)
    listener = await rig.listen(token)
    for count in range(300):
        if count % 9 == 0:  # before there are too many errors
            await listener.socket.close()
            listener = await rig.listen(token)
        message: dict[str, Any] = {
            "action": source.choice(("subscribe", "unsubscribe", "resume", "authenticate", "ping", 7))
        }
        for key in ("events", "filter", "since", "id", "token"):
            if source.random() < 0.5:
                message[key] = source.choice(ODD)
        answers = ("subscription.updated", "error", "pong", "authenticated")
        await listener.say(**message)
        if message["action"] != "resume" or not isinstance(message.get("since"), int):
            assert (await listener.next())["type"] in answers, message
        await listener.say(action="ping")
        while (await listener.next())["type"] != "pong":
            pass


# Ending.


async def test_a_token_that_ends_ends_the_socket(rig: EventsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "RECHECK_SECONDS", 0.05)
    token = await rig.member("ann")
    listener = await rig.listen(token)
    del rig.tokens[token]
    assert (await closed(listener))[0] == 4401


async def test_a_newer_token_keeps_the_socket_open(rig: EventsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "RECHECK_SECONDS", 0.05)
    token = await rig.member("ann")
    listener = await rig.listen(token)
    rig.tokens["newer"] = rig.tokens[token]
    assert (await listener.ask(action="authenticate", token="newer"))["type"] == "authenticated"
    del rig.tokens[token]
    rig.tokens["eve"] = type(rig.tokens["newer"])(name="user/eve", user="eve")
    assert (await listener.ask(action="authenticate", token="eve"))["type"] == "error"
    await rig.fleet.host("example.com")
    assert (await listener.next())["type"] == "virtual_host.created"


async def test_a_member_who_is_removed_hears_nothing_more(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    asked = await rig.listen(await rig.member("bob"))
    await asked.ask(action="subscribe", events=["*"], filter={"workspace_id": rig.workspace})
    await rig.remove_member("ann")
    await rig.remove_member("bob")
    await rig.fleet.host("example.com")
    await rig.caught_up()
    assert (await closed(asked))[0] == 4403, "it asked for a place by name"
    assert (await listener.ask(action="ping"))["type"] == "pong"


async def test_all_are_told_to_come_back_when_the_server_stops(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    rig.app.drain()
    assert (await closed(listener))[0] == 1012
    with pytest.raises(InvalidStatus) as refused:
        await rig.listen(await rig.member("bob"))
    assert refused.value.response.status_code == 503


async def test_a_client_that_vanishes_leaves_nothing_behind(rig: EventsRig) -> None:
    listener = await rig.listen(await rig.member("ann"))
    assert len(rig.app) == 1
    listener.socket.transport.abort()
    await until(lambda: len(rig.app) == 0)


# Missing and resuming.


async def test_one_who_comes_back_can_hear_what_it_missed(rig: EventsRig) -> None:
    token = await rig.member("ann")
    listener = await rig.listen(token)
    await rig.fleet.host("one.example")
    seen = (await listener.next())["data"]["revision"]
    await listener.socket.close()
    await rig.fleet.host("two.example")
    await rig.fleet.host("three.example")
    await rig.caught_up()

    again = await rig.listen(token)
    await again.ask(action="subscribe", events=["virtual_host.*"], since=seen)
    assert [(await again.next())["data"]["server_name"] for _ in range(2)] == ["two.example", "three.example"]


@pytest.mark.parametrize("ring_events", [8192, 1], ids=["ring", "history"])
async def test_resuming_after_any_event_loses_nothing_and_repeats_nothing(
    tmp_path: Path, ring_events: int
) -> None:
    """Also where one change means several events, of which only some had arrived."""
    async with events_rig(tmp_path, ring_events=ring_events) as rig:
        token = await rig.member("ann")
        start = rig.feed.revision
        agent = await rig.fleet.agent("web-01")
        await agent.open()
        await agent.health(running=False)
        await rig.fleet.host("one.example")
        # What is sent to an agent, and what it is, are told by themselves. The version before that with the
        # host may have been sent, too; after it, nothing more happens here.
        await until(
            lambda: (
                2 in rig.fleet.deployment_states(agent.agent_id)
                and rig.fleet.state(agent.agent_id) == "degraded"
            )
        )
        await rig.caught_up()
        whole = [told async for told in rig.feed.history((start, WHOLE), rig.feed.revision)]
        for what in ("config.started", "degraded"):
            assert any(what in told.text for told in whole)
        assert any(one.part for one in whole), "no change here means several events"
        for place, one in enumerate(whole[:-1], 1):
            again = await rig.listen(token)
            await again.say(action="resume", since=f"{one.revision}.{one.part}")
            rest = [await again.socket.recv() for _ in whole[place:]]
            assert rest == [told.text for told in whole[place:]]
            assert (await again.ask(action="ping"))["type"] == "pong", "and nothing else"
            # A number cannot say which of several events were seen: all of them come again.
            same = [told for told in whole if told.revision == one.revision]
            await again.say(action="resume", since=one.revision)
            first = json.loads(await again.socket.recv())["data"]["revision"]
            assert first == one.revision if len(same) > 1 else first > one.revision
            await again.socket.close()


async def test_what_left_the_ring_comes_from_the_stores_history_in_order(tmp_path: Path) -> None:
    async with events_rig(tmp_path, ring_events=2) as rig:
        start = rig.fleet.store.revision
        listener = await rig.listen(await rig.member("ann"))
        agent = await rig.fleet.agent("web-01")
        await agent.open()
        for number in range(5):
            await rig.fleet.host(f"h{number}.example")
        await rig.caught_up()
        again = await rig.listen(await rig.member("bob"))
        await again.say(action="resume", since=start)
        heard = [await again.next()]  # by then the server has begun with what is past
        await rig.fleet.host("last.example")
        while heard[-1]["data"].get("server_name") != "last.example":
            heard.append(await again.next())
        names = [one["data"]["server_name"] for one in heard if one["type"] == "virtual_host.created"]
        assert names == [f"h{number}.example" for number in range(5)] + ["last.example"]
        assert "agent.connected" in [one["type"] for one in heard]
        revisions = [one["data"]["revision"] for one in heard]
        assert revisions == sorted(revisions)
        assert listener is not again


async def write_host(rig: EventsRig, number: int) -> None:
    """A write as large as the store takes, around the rules for what people may write."""
    spec = VirtualHostSpec(name=f"h{number}", server_name="x" * 200_000, listen_port=80)
    scope = rig.fleet.scope
    await rig.fleet.store.transact(
        lambda draft: draft.put(VIRTUAL_HOST, scope, f"h{number}", spec=spec),
        actor="t",
        action="t",
        touches=[VIRTUAL_HOST.key(scope, f"h{number}")],
    )


async def test_a_slow_client_is_told_what_it_missed_and_may_have_it_after_all(tmp_path: Path) -> None:
    async with events_rig(tmp_path, ring_events=8) as rig:
        token = await rig.member("ann")
        address = f"{rig.address}/v1/events?token={token}"
        async with websockets.connect(address, max_queue=1, compression=None, ping_interval=None) as socket:
            listener = Listener(socket)
            assert (await listener.ask(action="ping"))["type"] == "pong"
            for number in range(150):  # 30 MB: far more than sockets and queues hold
                await write_host(rig, number)
            await rig.caught_up()
            heard = []
            while (one := await listener.next())["type"] != "events.missed":
                heard.append(one["data"]["name"])
            assert one["data"]["after"] < one["data"]["resumed_at"]
            await listener.say(action="resume", since=one["data"]["after"])
            # Newer ones may have been on their way before the server took that.
            one = await listener.until(lambda one: one["data"].get("name") == f"h{len(heard)}")
            heard.append(one["data"]["name"])
            while len(heard) < 150:
                one = await listener.next()
                if one["type"] == "virtual_host.created":
                    heard.append(one["data"]["name"])
            assert heard == [f"h{number}" for number in range(150)], "each of them, once, in order"


async def test_the_history_says_what_the_feed_said(rig: EventsRig) -> None:
    start = rig.feed.revision
    listener = await rig.listen(await rig.member("ann"))
    agent = await rig.fleet.agent("web-01")
    await agent.open()
    await agent.health(running=False)
    update = await agent.next("config_update")
    await agent.status(update, "PENDING", "VALIDATING", "APPLYING", "SUCCESS")
    await agent.health(update.version)
    host = await rig.fleet.host("example.com")
    await agent.next("config_update")
    agent.leave()
    await until(lambda: rig.fleet.state(agent.agent_id) == "offline")
    await rig.fleet.hosts.delete(rig.fleet.scope, host.name, if_match=None, actor=BOSS)
    await rig.caught_up()
    end = rig.feed.revision
    said = [told.text async for told in rig.feed.history((start, WHOLE), end)]
    heard = [await listener.socket.recv() for _ in said]
    assert heard == said
    assert (await listener.ask(action="ping"))["type"] == "pong", "and nothing else"
    assert len(said) > 10
