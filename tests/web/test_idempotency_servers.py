"""One idempotency key at several servers that share a database."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from support.shared.cluster_sim import Simulation
from support.shared.run_twice import run_twice
from support.shared.storekit import KINDS, SCOPE, THING, Spec
from support.shared.three_stores import three_stores
from support.shared.virtual_loop import run

from fleetplane.kernel.access import Grant, Permission, Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.web.rest import idempotency
from fleetplane.web.rest.family import FamilyText, RestFamily
from fleetplane.web.rest.gate import OperatorCaller, RoleGate
from fleetplane.web.rest.idempotency import USED_KEY, KeptAnswer
from fleetplane.web.rest.routes import Answer, Call, Headers, Route, RouteTable

ROUNDS = int(os.environ.get("CONTESTED_KEYS", "60"))
"""A short form of a thousand."""
MAKE = Permission("things.make")
MAKER = Role("maker")
TEXT = FamilyText(title="Things", version="1", description="Some.", summary="REST: things")


class Made(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class Floor:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.clock: Clock = store.clock
        self.master = MasterKey(bytes(32), store.clock)


class Server:
    """A family of four routes, at one store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.floor = Floor(store)
        handlers = {
            "/promised": self.promised,
            "/written": self.written,
            "/unsigned": self.unsigned,
            "/said": self.said,
        }
        routes = (
            Route(
                method="POST",
                path=path,
                handler=handler,
                summary="Make",
                tag="T",
                permission=MAKE,
                body=Any,
                answer=Made,
                status=201,
            )
            for path, handler in handlers.items()
        )
        gate = RoleGate(_who, {MAKER: (Grant(permission=MAKE),)}, scope="")
        self.family = RestFamily(
            self.floor,
            RouteTable("/t", routes),
            gate,
            domain="things",
            text=TEXT,
            requests_per_minute=1_000_000,
        )
        self.calls = 0
        transport = httpx.ASGITransport(app=self.family.gateway)
        self._http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def make(self, actor: str) -> str:
        self.calls += 1
        name = self.store.clock.token_bytes(8).hex()

        def change(draft: Draft) -> str:
            draft.put(THING, SCOPE, name, spec=Spec(value=1))
            return name

        done = await self.store.transact(change, actor=actor, action="make", touches=[THING.key(SCOPE, name)])
        return done.value

    async def promised(self, call: Call[Any]) -> Answer[Made]:
        """What is answered follows from what is written."""
        view = call.answering(lambda name: Answer(content=Made(name=name)))
        return view(await self.make(call.signed("maker")))

    async def written(self, call: Call[Any]) -> Answer[Made]:
        """The answer is known later than what it is about."""
        name = await self.make(call.signed("maker"))
        await asyncio.sleep(0.01)
        return Answer(content=Made(name=name))

    async def unsigned(self, _call: Call[Any]) -> Answer[Made]:
        """As whoever knows nothing of keys writes, in a task of its own."""
        name = await run_to_completion(self.make("maker"))
        await asyncio.sleep(0.01)
        return Answer(content=Made(name=name))

    async def said(self, _call: Call[Any]) -> Answer[Made]:
        """Nothing of it is written."""
        self.calls += 1
        await asyncio.sleep(0.001)
        return Answer(content=Made(name=self.store.clock.token_bytes(8).hex()))

    async def post(self, path: str, key: str, body: Any = 1, *, maker: str = "maker") -> httpx.Response:
        headers = {"authorization": maker, "idempotency-key": key}
        await self.store.confirmed()  # as every server does before it answers
        with self.store.writing_here():
            return await self._http.post(f"/t{path}", json=body, headers=headers)

    async def close(self) -> None:
        await self._http.aclose()


def _who(headers: Headers) -> OperatorCaller:
    name = headers.credential or ""
    return OperatorCaller(principal=Principal(name=name, roles=frozenset({MAKER}), scope=""))


@asynccontextmanager
async def servers(seed: int = 0) -> AsyncIterator[Sequence[Server]]:
    async with three_stores(KINDS, seed=seed) as stores:
        found = [Server(store) for store in stores]
        try:
            yield found
        finally:
            for one in found:
                await one.close()


async def _at_once(found: Sequence[Server], path: str, key: str) -> list[httpx.Response]:
    return list(await asyncio.gather(*(server.post(path, key) for server in found)))


def test_a_key_at_three_servers_at_once_does_one_thing_and_every_answer_is_about_it() -> None:
    async def race() -> None:
        async with servers() as found:
            replayed = 0
            for number in range(ROUNDS):
                answers = await _at_once(found, "/promised", f"k{number}")
                assert {answer.status_code for answer in answers} == {201}, [one.text for one in answers]
                assert len({answer.content for answer in answers}) == 1
                again = sum("idempotency-replayed" in answer.headers for answer in answers)
                assert again == 2
                replayed += again
            await found[0].store.confirmed()
            assert len(found[0].store.list(THING)) == ROUNDS
            assert replayed == 2 * ROUNDS
            # Those that came too late had begun, and were refused: it is a race.
            assert sum(server.calls for server in found) > ROUNDS

    run(race())


@pytest.mark.parametrize("path", ["/written", "/unsigned", "/said"])
def test_a_key_whose_answer_is_known_late_is_answered_once_or_said_to_be_under_way(path: str) -> None:
    async def race() -> None:
        async with servers() as found:
            for number in range(ROUNDS // 3):
                key = f"k{number}"
                answers = await _at_once(found, path, key)
                assert {answer.status_code for answer in answers} <= {201, 409}
                first = {answer.content for answer in answers if answer.status_code == 201}
                assert len(first) == 1
                later = await _at_once(found, path, key)
                assert {answer.content for answer in later} == first
                assert all("idempotency-replayed" in answer.headers for answer in later)
            await found[0].store.confirmed()
            made = len(found[0].store.list(THING))
            assert made == (0 if path == "/said" else ROUNDS // 3)

    run(race())


def test_a_key_used_at_one_server_is_known_at_the_others_with_its_body() -> None:
    async def race() -> None:
        async with servers() as found:
            first = await found[1].post("/promised", "k")
            for server in found:
                again = await server.post("/promised", "k")
                assert (again.status_code, again.content) == (201, first.content)
                other = await server.post("/promised", "k", body=2)
                assert other.status_code == 409
                assert "another body" in other.text
            assert [server.calls for server in found] == [0, 1, 0]

    run(race())


def test_of_each_key_one_thing_is_made_through_kills() -> None:
    """By a transaction that has the answer, by one that has not, and by somebody who is called."""
    kills = asked = called = answered = 0
    for seed in itertools.count():
        simulation = Simulation(seed, trouble="kills", repeaters=8)
        simulation.run()
        kills += simulation.kills
        asked += simulation.outside.asked
        called += simulation.outside.called.total()
        answered += len(simulation.outside.told)
        if kills >= ROUNDS:
            break
    print(f"\n{kills} kills: {asked} requests, {answered} keys answered, {called} calls outside")
    assert asked > 2 * answered > 4 * kills
    assert called > kills


def test_a_key_is_over_in_its_time_by_the_database_and_on_every_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machines' clocks differ by an hour either way."""
    monkeypatch.setattr(idempotency, "KEPT_SECONDS", 60)

    async def race() -> None:
        async with servers() as found:
            first = await found[2].post("/promised", "k")
            await asyncio.sleep(50)
            for server in found:
                assert (await server.post("/promised", "k")).content == first.content
            assert await found[0].family._answers.sweep() == 0
            await asyncio.sleep(11)
            second = await found[1].post("/promised", "k")  # which nobody had swept
            assert second.content != first.content
            for server in found:
                assert (await server.post("/promised", "k")).content == second.content
            await asyncio.sleep(61)
            assert await found[0].family._answers.sweep() == 1
            for server in found:
                await server.store.confirmed()
                assert server.store.claims(USED_KEY) == []
            assert await found[0].store.secret_names("things/") == []

    run(race())


def test_what_was_recorded_before_keys_were_claims_is_still_answered() -> None:
    async def race() -> None:
        async with servers() as found:
            one = found[0]
            digest = one.family._answers.digest("maker", "POST /t/promised", "k")
            expires = one.floor.clock.now_ns() // 1_000_000_000 + 60
            kept = KeptAnswer(fingerprint=hashlib.sha256(b"1").digest(), status=201, body=b'{"name":"old"}')
            name = f"things/idempotency/{expires:012d}/{digest}"
            sealed = one.floor.master.seal(msgspec.msgpack.encode(kept), purpose=name)
            await one.store.put_secret(name, sealed)
            await one.family.take_over()  # as the active server does, for all
            for server in found:
                assert (await server.post("/promised", "k")).content == b'{"name":"old"}'
            await asyncio.sleep(61)
            fresh = await found[1].post("/promised", "k")
            assert fresh.status_code == 201
            assert "old" not in fresh.text
            assert await one.store.secret_names("things/idempotency/") == []

    run(race())


def test_too_many_keys_make_the_oldest_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "ANSWERS_LIMIT", 5)
    monkeypatch.setattr(idempotency, "SWEEP_EACH", 4)

    async def many() -> None:
        async with servers() as found:
            for number in range(12):
                await found[1].post("/promised", f"k{number}")
                await asyncio.sleep(1)
            used = found[1].store.claims(USED_KEY)
            assert len(used) == 5
            assert "idempotency-replayed" in (await found[1].post("/promised", "k11")).headers
            assert "idempotency-replayed" not in (await found[1].post("/promised", "k0")).headers

    run(many())


def test_nobodys_keys_give_way_to_the_many_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "ANSWERS_LIMIT", 6)
    monkeypatch.setattr(idempotency, "SWEEP_EACH", 4)

    async def many() -> None:
        async with servers() as found:
            for number in range(2):
                await found[1].post("/promised", f"k{number}", maker="modest")
            for number in range(14):
                await asyncio.sleep(1)
                await found[1].post("/promised", f"k{number}", maker="greedy")
            assert len(found[1].store.claims(USED_KEY)) == 6
            for number in range(2):
                again = await found[1].post("/promised", f"k{number}", maker="modest")
                assert "idempotency-replayed" in again.headers

    run(many())


def test_records_of_keys_are_the_same_when_their_transactions_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def race() -> None:
        async with servers() as found:
            for number in range(5):
                await _at_once(found, "/promised", f"k{number}")
                await _at_once(found, "/written", f"w{number}")

    with run_twice(monkeypatch) as seen:
        run(race())
    assert {"make", "idempotency.keep"} <= set(seen)
