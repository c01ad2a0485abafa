"""The gate of a server that shares its database: what it lets pass at once, what waits, what is refused."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
from support.shared.server_pair import Pair, with_pair
from support.shared.storekit import SCOPE, THING, put

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import SettingsError, Unavailable
from fleetplane.kernel.store.engine import GroupAuthor
from fleetplane.kernel.store.servers import leader_lease
from fleetplane.kernel.store.servers.leader_lease import FRESH_SECONDS
from fleetplane.rpc import Needs
from fleetplane.server.read_gate import ReadGate, StandsBy
from fleetplane.web.ops import READS_ONLY, Mount
from fleetplane.web.rest.app import application
from fleetplane.web.rest.routes import Answer, Route, RouteTable

READS = {"type": "http", "method": "GET", "path": "/x", "headers": []}


async def nothing() -> Any:
    raise AssertionError


async def asked(app: Any, scope: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of an answer."""
    said: list[Any] = []

    async def send(event: Any) -> None:
        said.append(event)

    await app(dict(scope), nothing, send)
    return said[0].get("status", said[0].get("code")), b"".join(event.get("body", b"") for event in said)


def test_a_standby_answers_reads_once_it_is_up_to_date_and_nothing_else() -> None:
    async def work(servers: Pair) -> None:
        gate = ReadGate(servers.standby, servers.standby.store.reader(), active=False)
        assert [gate.is_open(needs) for needs in Needs] == [False, False, False, True]
        with pytest.raises(StandsBy, match="one is active"):
            await gate.passed(Needs.ACTIVE)
        for number in range(5):
            await put(servers.active, f"x{number}", 1)
            await gate.passed(Needs.STORE)
            assert servers.standby.store.get(THING, SCOPE, f"x{number}") is not None
        assert gate.is_fresh

    with_pair(work)


def test_the_active_server_asks_before_every_answer_since_others_write_too() -> None:
    async def work(servers: Pair) -> None:
        gate, index = ReadGate(servers.first, servers.active, active=True), servers.first.index
        assert [gate.is_open(needs) for needs in Needs] == [False, False, False, True]
        before = index.looks
        for needs in (Needs.ACTIVE, Needs.STORE, Needs.WRITES):
            await gate.passed(needs)
        assert index.looks == before + 3
        # Stopped and woken: what waited in its sockets is handled before it learns that it was replaced.
        servers.first.seat.heard -= leader_lease.GIVE_UP_SECONDS + 1
        servers.first_link.cut = True
        with pytest.raises(Unavailable):
            await gate.passed(Needs.STORE)
        servers.first_link.cut = False

    with_pair(work)


def test_what_may_write_on_a_server_that_stands_by_is_let_and_nothing_else() -> None:
    async def work(servers: Pair) -> None:
        store = servers.standby.store.reader(lambda: StandsBy("one is active"))
        gate = ReadGate(servers.standby, store, active=False)

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            await put(store, "z", 1)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        async with servers.standby.store.written(GroupAuthor("two", 1)):
            await gate.passed(Needs.WRITES)
            with gate.inside(Needs.WRITES):
                await put(store, "x", 1)
            assert store.get(THING, SCOPE, "x") is not None
            for needs in (Needs.STORE, Needs.NOTHING, Needs.ACTIVE):
                with gate.inside(needs), pytest.raises(StandsBy):
                    await put(store, "y", 1)
            mounted = gate.mount(Mount(path="/z", app=app, needs=Needs.WRITES))
            assert (await asked(mounted.app, READS))[0] == 200
            with pytest.raises(StandsBy):
                await asked(gate.mount(Mount(path="/z", app=app, needs=Needs.STORE)).app, READS)

    with_pair(work)


def test_a_secret_that_cannot_be_read_keeps_nobody_waiting() -> None:
    class Stuck:
        def secret_changed(self, name: str) -> None:
            pass

        async def refresh(self) -> None:
            await asyncio.Event().wait()

    async def work(servers: Pair) -> None:
        store, loop = servers.standby.store.reader(), asyncio.get_running_loop()
        store.keep_fresh(Stuck())
        gate, begun = ReadGate(servers.standby, store, active=False), loop.time()
        with pytest.raises(Unavailable, match="a secret that has changed"):
            await gate.passed(Needs.STORE)
        assert loop.time() - begun <= 2 * FRESH_SECONDS

    with_pair(work)


def test_routes_stand_behind_the_same_gate() -> None:
    async def work(servers: Pair) -> None:
        store = servers.standby.store.reader()
        seen: list[Any] = []

        async def app(_scope: Any, _receive: Any, send: Any) -> None:
            seen.append(store.get(THING, SCOPE, "x"))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"ok"})

        gate = ReadGate(servers.standby, store, active=False)
        mounted = gate.mount(Mount(path="/x", app=app, summary="s", is_page=True, needs=Needs.STORE))
        assert (mounted.path, mounted.summary, mounted.is_page) == ("/x", "s", True)
        await put(servers.active, "x", 1)
        assert await asked(mounted.app, READS) == (200, b"ok")
        assert seen[0] is not None
        await _not_reads(gate, app)
        assert len(seen) == 1
        servers.link.cut = True
        await asyncio.sleep(leader_lease.GIVE_UP_SECONDS)
        assert ((await asked(mounted.app, READS))[0], len(seen), gate.is_fresh) == (503, 1, False)

    with_pair(work)


def test_a_gate_answers_everything_from_the_moment_at_which_its_server_leads() -> None:
    async def work(servers: Pair) -> None:
        store = servers.standby.store.reader(lambda: StandsBy("one is active"))
        gate = ReadGate(servers.standby, store, active=False)
        asked_as: list[bool] = []

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            asked_as.append(READS_ONLY in scope)
            await send({"type": "http.response.start", "status": 200, "headers": []})

        acts = gate.mount(Mount(path="/acts", app=app, summary="s"))
        reads = gate.mount(Mount(path="/reads", app=app, needs=Needs.STORE))
        assert [(await asked(one.app, READS))[0] for one in (acts, reads)] == [503, 200]
        gate.lead()
        assert acts.listed()
        await gate.passed(Needs.ACTIVE)
        assert [(await asked(one.app, READS))[0] for one in (acts, reads)] == [200, 200]
        assert asked_as == [True, False, False]

    with_pair(work)


async def _not_reads(gate: ReadGate, app: Any) -> None:
    """What has no reads is refused as a whole, and not missing; what needs nothing has no gate."""
    refused = gate.mount(Mount(path="/y", app=app, summary="s", is_page=True))
    status, body = await asked(refused.app, READS)
    assert (status, b"one is active" in body, refused.path, refused.listed()) == (503, True, "/y", False)
    assert (await asked(refused.app, {"type": "websocket", "path": "/y"}))[0] == 1013
    document = Mount(path="/z", app=app, needs=Needs.NOTHING)
    assert gate.mount(document) is document


def test_a_route_that_is_no_read_is_refused_where_only_reads_are_answered() -> None:
    async def handler(_call: Any) -> Answer[None]:
        return Answer(content=None)

    async def work() -> None:
        routes = [
            Route(method="GET", path=path, handler=handler, summary=path, tag="t", public=True, needs=needs)
            for path, needs in (("/reads", Needs.STORE), ("/acts", Needs.ACTIVE))
        ]
        app = application(
            RouteTable("/x", routes),
            gate=Mock(),
            answers=Mock(),
            store=Mock(),
            clock=SystemClock(),
            requests_per_minute=9,
        )
        for more, expected in (
            ({}, (200, 200)),
            ({READS_ONLY: lambda: StandsBy("one is active")}, (200, 503)),
        ):
            found = []
            for path in ("/x/reads", "/x/acts"):
                scope = {**READS, **more, "path": path, "raw_path": path.encode(), "query_string": b""}
                status, body = await asked(app, {**scope, "root_path": "", "http_version": "1.1"})
                assert status == 200 or b"one is active" in body
                found.append(status)
            assert tuple(found) == expected

    asyncio.run(work())


def test_what_is_said_to_read_is_a_get() -> None:
    async def handler(_call: Any) -> Answer[None]:
        return Answer(content=None)

    with pytest.raises(SettingsError, match="is no GET"):
        RouteTable(
            "/x",
            [
                Route(
                    method="DELETE",
                    path="/y",
                    handler=handler,
                    summary="y",
                    tag="t",
                    public=True,
                    needs=Needs.STORE,
                )
            ],
        )
