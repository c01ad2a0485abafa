"""Several servers on a real PostgreSQL, all of which write."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from support.shared.enginekit import EMPTY, group
from support.shared.postgres_server import PostgresServer
from support.shared.server_processes import DEADLINE_SECONDS, Process, check, until
from support.shared.storekit import KINDS, SCOPE, THING, Spec, audit_of, put

from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists, NotFound, Unavailable
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.kernel.store.engine import GroupAuthor, GroupOutcome, GroupPage, Superseded, WriteGroup
from fleetplane.kernel.store.engines import postgres as postgres_engine
from fleetplane.kernel.store.engines import postgres_schema
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.servers import leader_lease
from fleetplane.kernel.store.servers.replica import Replica

CLAIMS = int(os.environ.get("CONTESTED_CLAIMS", "100"))
"""A short form of a thousand."""
PATIENCE = f"{DEADLINE_SECONDS * 1000:.0f}"
"""In milliseconds."""
ENOUGH = 30
"""Writes of each server before one is killed."""


@pytest.fixture
def url(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A database for servers of this process, which lose nothing by being held up."""
    patient = {
        name: text.replace(f"secs => {leader_lease.LIFE_SECONDS}", f"secs => {DEADLINE_SECONDS}")
        for name, text in postgres_schema.FUNCTIONS.items()
    }
    assert patient != postgres_schema.FUNCTIONS
    monkeypatch.setattr(postgres_schema, "FUNCTIONS", patient)
    monkeypatch.setattr(leader_lease, "LIFE_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(leader_lease, "GIVE_UP_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setattr(leader_lease, "FRESH_SECONDS", DEADLINE_SECONDS)
    monkeypatch.setitem(postgres_engine.WRITER, "lock_timeout", PATIENCE)
    return postgres.database()


class SlowEngine(PostgresEngine):
    """Of a server whose event loop is late: what it wants to write reaches the database after others' did."""

    is_slow = False

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        while self.is_slow and (await self.mark()).number == group.before.number:
            await asyncio.sleep(0.001)
        return await super().commit(group)


@asynccontextmanager
async def servers(url: str, folder: Path, *names: str) -> AsyncIterator[list[Store]]:
    """Servers in this process, the first of which is active."""
    stores: list[Store] = []
    async with asyncio.timeout(DEADLINE_SECONDS), AsyncExitStack() as stack:
        # One that is held up while it has the lock keeps it.
        stack.enter_context(patch.dict(postgres_engine.WRITER, idle_in_transaction_session_timeout=PATIENCE))
        for name in names:
            engine = await SlowEngine.open(url)
            stack.push_async_callback(engine.close)
            standby = await Replica.load(
                engine,
                StoreSettings(path=folder / name / "store.db", url=url, server=name),
                server=name,
                kinds=KINDS,
                clock=SystemClock(),
            )
            await stack.enter_async_context(_running(standby, is_first=not stores))
            stores.append(standby.store)
        yield stores


@asynccontextmanager
async def _running(standby: Replica, *, is_first: bool) -> AsyncIterator[None]:
    if is_first:
        async with standby.active():
            yield
        return
    begun, ended = asyncio.Event(), asyncio.Event()

    async def meanwhile(_: Replica) -> None:
        begun.set()
        await ended.wait()

    async def run() -> None:
        async with standby.active(meanwhile):
            pass

    running = asyncio.create_task(run())
    try:
        await begun.wait()
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_one_claim_at_three_servers_at_once_has_one_owner(tmp_path: Path, url: str) -> None:
    async def redeem(store: Store, token: str, owner: str) -> bool:
        def change(draft: Draft) -> None:
            draft.claim(THING, SCOPE, "token", token, owner)
            draft.put(THING, SCOPE, f"{token}-{owner}", spec=Spec(value=1))

        try:
            touches = [THING.key(SCOPE, f"{token}-{owner}")]
            await store.transact(change, actor=owner, action="redeem", touches=touches)
        except AlreadyExists:
            return False
        return True

    async with servers(url, tmp_path, "one", "two", "three") as stores:
        for number in range(CLAIMS):
            token = f"token{number}"
            won = await asyncio.gather(*(redeem(store, token, f"owner{n}") for n, store in enumerate(stores)))
            assert sorted(won) == [False, False, True]
            owner = f"owner{won.index(True)}"
            for store in stores:
                await store.confirmed()
                assert store.claimed_by(THING, SCOPE, "token", token) == owner
                names = [thing.name for thing in store.list(THING) if thing.name.startswith(f"{token}-")]
                assert names == [f"{token}-{owner}"]
        assert sum(store._writer.losses for store in stores) > CLAIMS, "somebody lost, and ran again"
        assert (await audit_of(stores[2])).intact


async def test_a_refusal_is_not_given_from_what_a_server_does_not_know_yet(tmp_path: Path, url: str) -> None:
    def look(name: str, draft: Draft) -> int:
        found = draft.get(THING, SCOPE, name)
        if found is None:
            raise NotFound(name)
        return found.spec.value

    async with servers(url, tmp_path, "one", "two") as (one, two):
        for value in range(20):
            writer, reader = (one, two) if value % 2 else (two, one)
            await put(writer, f"x{value}", value)
            found = await reader.transact(partial(look, f"x{value}"), actor="t", action="look", touches=[])
            assert found.value == value


async def test_a_slow_server_comes_to_its_turn_although_others_are_always_faster(
    tmp_path: Path, url: str
) -> None:
    async with servers(url, tmp_path, "one", "two", "slow") as (one, two, slow):
        engine = slow._engine
        assert isinstance(engine, SlowEngine)
        engine.is_slow = True

        async def hammer(store: Store, name: str) -> None:
            value = 0
            while True:
                value += 1
                await put(store, name, value)

        hammering = [asyncio.create_task(hammer(store, f"h{n}")) for n, store in enumerate((one, two))]
        try:
            for value in range(3):
                await put(slow, "slow", value)
        finally:
            for task in hammering:
                task.cancel()
            await asyncio.gather(*hammering, return_exceptions=True)
        assert slow._writer.locked >= 3
        await one.confirmed()
        found = one.get(THING, SCOPE, "slow")
        assert found is not None
        assert found.spec.value == 2


async def test_a_server_whose_process_was_replaced_writes_nothing_more(tmp_path: Path, url: str) -> None:
    async with servers(url, tmp_path, "one", "two") as (one, two):
        await put(two, "x")
        engine = one._engine
        assert isinstance(engine, PostgresEngine)
        await engine.enlist("two")
        with pytest.raises(Unavailable):
            await put(two, "late")
        with pytest.raises(Superseded, match="another process of the same name"):
            await two.writing()
        await one.confirmed()
        assert one.get(THING, SCOPE, "late") is None


async def test_a_server_that_is_not_heard_of_writes_nothing_until_it_is(tmp_path: Path, url: str) -> None:
    engine = await PostgresEngine.open(url)
    try:
        guest = GroupAuthor("guest", await engine.enlist("guest"))
        first = group(EMPTY, "a")
        first.author = guest
        await engine.leave(guest)  # as if it had not renewed for long
        outcome = await engine.commit(first)
        assert (outcome.written, outcome.alive) == (False, False)
        settled = await engine.settle(EMPTY, first.id, guest)
        assert (settled.alive, settled.mark) == (False, EMPTY), "it cannot take a number either"
        assert (await engine.renew(guest)).alive
        outcome = await engine.commit(first)
        assert (outcome.written, outcome.alive, outcome.author) == (True, True, guest)
        unknown = group(first.after, "b")
        unknown.author = GroupAuthor("unknown", 1)
        assert not (await engine.commit(unknown)).alive
    finally:
        await engine.close()


async def test_who_has_the_lock_and_does_not_write_loses_it(url: str) -> None:
    engine, other = await PostgresEngine.open(url), await PostgresEngine.open(url)
    written = asyncio.Event()
    mine, theirs = group(EMPTY, "mine"), group(EMPTY, "theirs")

    async def idle(page: GroupPage) -> WriteGroup:
        assert page.head == EMPTY
        begun.set()
        await written.wait()
        return mine

    begun = asyncio.Event()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            alone = asyncio.create_task(engine.commit_alone(after=0, limit=100, draft=idle))
            await begun.wait()
            assert (await other.commit(theirs)).written, "it waited for the lock, and not for ever"
            written.set()
            with pytest.raises(Unavailable):
                await alone
            assert not (await engine.settle(EMPTY, mine.id, mine.author)).written
            assert await engine.mark() == theirs.after

            async def nothing(_: GroupPage) -> None:
                return None

            async def next_group(page: GroupPage) -> WriteGroup:
                assert [list(found.log) for found in page.groups] == [theirs.log]
                return group(theirs.after, "next")

            assert await engine.commit_alone(after=0, limit=100, draft=nothing) is None
            outcome = await engine.commit_alone(after=0, limit=100, draft=next_group)
            assert outcome is not None
            assert (outcome.written, outcome.mark.number) == (True, 2)
            assert await engine.commit_alone(after=0, limit=1, draft=next_group) is None, (
                "too much is missing"
            )
    finally:
        await engine.close()
        await other.close()


async def test_three_that_write_and_one_is_killed_lose_nothing_that_was_acknowledged(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    url = postgres.database()

    def made(name: str) -> Process:
        everyone.append(Process(url, tmp_path, name, writes="always"))
        return everyone[-1]

    everyone: list[Process] = []
    alive = [made(name) for name in ("one", "two", "three")]
    try:
        for _ in range(2):
            await until(partial(_write, alive, 0), DEADLINE_SECONDS, "not all write")
            gone, *alive = alive
            gone.kill()
            before = min(len(server.acknowledged()) for server in alive)
            await until(partial(_write, alive, before), DEADLINE_SECONDS, "the others do not go on")
            alive.append(made(gone.name))
    finally:
        for server in everyone:
            server.kill()
    await check(url, set().union(*(server.acknowledged() for server in everyone)))


def _write(alive: list[Process], before: int) -> bool:
    """Whether all have written more, but for one that ended because it was held up for too long."""
    running = [server for server in alive if server.child.poll() is None]
    return all(len(server.acknowledged()) > before + ENOUGH for server in running)
