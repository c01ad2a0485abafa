"""What PostgreSQL does that one would not expect, each as a test that fails if the engine walks into it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest
from support.shared import stopped_committer
from support.shared.enginekit import EMPTY, group
from support.shared.postgres_server import PostgresServer, running

from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.store.engine import DatabaseMark, GroupAuthor, GroupOutcome, WriteGroup
from fleetplane.kernel.store.engines.postgres import WRITER, PostgresEngine
from fleetplane.kernel.store.engines.postgres_line import LOADER, connect, translated
from fleetplane.kernel.store.engines.postgres_schema import LOCK
from fleetplane.kernel.store.servers.level import SUPPORTED

DEADLINE_SECONDS = 60.0
LOCKS = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database"
    " WHERE datname = current_database() AND locktype = 'advisory'"
)
STATE = (
    "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%commit_group%'"
    " AND pid <> pg_backend_pid()"
)
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
TAKE_LOCK = f"SELECT pg_advisory_xact_lock({LOCK}, hashtext(current_schema()))"


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresEngine]:
    engine = await PostgresEngine.open(url)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield engine
    finally:
        await engine.close()


async def waiting_for_lock(watcher: asyncpg.Connection, number: int) -> None:
    query = f"{LOCKS} AND NOT granted"
    while await watcher.fetchval(query) < number:
        await asyncio.sleep(0.01)


async def test_one_who_waited_for_the_lock_sees_all_that_was_written_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(a) Lock and read in one statement return the head of before, or a new head without its events."""
    monkeypatch.setitem(WRITER, "lock_timeout", "60000")  # however long we take to let go of it
    async with opened(url) as engine, opened(url) as other:
        holder = await connect(url, {})
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute(TAKE_LOCK)
        first, late = group(EMPTY, "a", "b"), group(EMPTY, "c")
        commits = [asyncio.ensure_future(engine.commit(first))]
        await waiting_for_lock(holder, 1)
        commits.append(asyncio.ensure_future(other.commit(late)))
        await waiting_for_lock(holder, 2)
        await transaction.rollback()
        outcomes = await asyncio.gather(*commits)
        assert sorted(outcome.written for outcome in outcomes) == [False, True]
        winner = first if outcomes[0].written else late
        assert outcomes[0].mark == outcomes[1].mark == winner.after
        page = await other.groups(after=0, limit=100)
        assert [list(found.log) for found in page.groups] == [winner.log]
        await holder.close()


async def test_horizon_and_log_are_read_as_of_one_moment(url: str) -> None:
    """(b) Read one after the other, events were lost silently when a trim came between."""
    async with opened(url) as engine:
        mark = EMPTY
        for _ in range(6):
            one = group(mark, "a")
            await engine.commit(one)
            mark = one.after
        async with engine._reading(snapshot=True) as reader:
            assert await reader.fetchval("SELECT max(compacted) FROM groups") == 0
            moved = group(mark, "b")
            moved.after = replace(moved.after, compacted=5)
            await engine.commit(moved)
            assert await engine.trim(100) == 4
            assert await reader.fetchval("SELECT count(*) FROM log") == 6, "as it was at the first look"

        async def watcher() -> None:
            for _ in range(60):
                page = await engine.history("thing", after=6, until=1000, limit=1000)
                revisions = [row.revision for row in page.events]
                if page.compacted <= 6 and revisions:
                    assert revisions == list(range(7, revisions[-1] + 1))

        async def compactor(mark: DatabaseMark) -> None:
            for _ in range(30):
                one = group(mark, "a", "b")
                one.after = replace(one.after, compacted=mark.revision - 1)
                await engine.commit(one)
                await engine.trim(100)
                mark = one.after

        await asyncio.gather(watcher(), compactor(moved.after))


async def test_a_server_that_stops_in_the_call_delays_nobody(url: str) -> None:
    """(c) The lock is never held while a client is waited for."""
    async with opened(url) as engine:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            stopped_committer.__file__,
            url,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert child.stdout is not None
            assert await child.stdout.readline() == b"ready\n"
            while _state(child.pid) != "T":
                await asyncio.sleep(0.01)
            # Its call has ended, though it has not heard so: between transactions, and not in one.
            reader = await connect(url, {})
            while await reader.fetchval(STATE) != "idle":
                await asyncio.sleep(0.01)
            assert _state(child.pid) == "T"
            assert not await reader.fetchval(LOCKS)
            await reader.close()
            assert (await engine.commit(group(await engine.mark(), "a"))).written
        finally:
            child.send_signal(signal.SIGKILL)
            await child.wait()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


async def test_one_who_idles_under_the_lock_is_cut_off_before_others_give_up(url: str) -> None:
    """(c), (d) The time-outs are in this order: idle, socket, lock."""
    async with opened(url) as engine:
        holder = await connect(url, WRITER)
        shown = [await holder.fetchval(f"SHOW {name}") for name in sorted(WRITER)]
        assert shown == ["1s", "5s", "3000"], "idle, lock, socket"
        await holder.execute(f"BEGIN; {TAKE_LOCK}")  # in one call: it may not idle in between either
        outcome = await engine.commit(group(EMPTY, "a"))
        assert outcome.written
        holder.terminate()


async def test_a_commit_that_waits_for_its_standby_is_never_cancelled() -> None:
    """(e) Cancelled, it would become visible to all although it is not replicated."""
    with running() as server:
        url = server.database()
        async with opened(url) as engine:
            first = group(EMPTY, "a")
            await engine.commit(first)
            await _configure(server, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            watcher = await connect(server.url(), LOADER)
            doubtful, commit = await _in_doubt(engine, watcher, first)
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            await asyncio.sleep(0.5)
            assert await engine.mark() == doubtful.before, "nobody sees it"
            # It holds the lock for as long: to ask for its fate is to wait for it.
            settling = asyncio.ensure_future(_settled(engine, doubtful))
            await asyncio.sleep(0.2)
            assert not settling.done()
            await _configure(server, "ALTER SYSTEM RESET synchronous_standby_names")
            outcome = await settling
            assert (outcome.written, outcome.mark) == (True, doubtful.after)
            await watcher.close()


async def _in_doubt(
    engine: PostgresEngine, watcher: asyncpg.Connection, last: WriteGroup
) -> tuple[WriteGroup, asyncio.Future[GroupOutcome]]:
    """A group whose commit waits; those before went through while PostgreSQL read its configuration."""
    while True:
        last = group(last.after, "b")
        commit = asyncio.ensure_future(engine.commit(last))
        while not commit.done():
            if await watcher.fetchval(WAITING):
                return last, commit
            await asyncio.sleep(0.01)


async def _settled(engine: PostgresEngine, doubtful: WriteGroup) -> GroupOutcome:
    while True:
        try:
            return await engine.settle(doubtful.before, doubtful.id, doubtful.author)
        except Unavailable:  # the lock was not free in time
            continue


async def _configure(server: PostgresServer, statement: str) -> None:
    connection = await connect(server.url(), {"synchronous_commit": "local"})
    await connection.execute(statement)
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()


async def test_no_row_is_updated_by_every_group(url: str) -> None:
    """(f) Under one old snapshot a row that all update becomes slower with each."""
    async with opened(url) as engine:
        mark = EMPTY
        for number in range(20):
            one = group(mark, f"n{number}")
            one.kinds = []
            await engine.commit(one)
            mark = one.after
        reader = await connect(url, {})
        await reader.execute("SELECT pg_stat_force_next_flush()")
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await reader.fetchval(
                "SELECT sum(n_tup_ins) FROM pg_stat_user_tables WHERE relname = 'groups'"
            ):
                await asyncio.sleep(0.1)
        updated = "SELECT relname FROM pg_stat_user_tables WHERE n_tup_upd > 0"
        assert [row["relname"] for row in await reader.fetch(updated)] == []
        await reader.close()


async def test_a_commit_in_doubt_is_settled_by_taking_its_number(url: str) -> None:
    """What is on its way when its sender gives up must not arrive after the sender was told it had not."""
    async with opened(url) as engine:
        lost = group(EMPTY, "lost")
        settled = await engine.settle(EMPTY, lost.id, lost.author)
        assert (settled.written, settled.mark) == (False, replace(EMPTY, number=1))
        assert not (await engine.commit(lost)).written, "it arrives late, and finds its number taken"
        assert (await engine.commit(group(settled.mark, "next"))).written


async def test_one_server_is_seated_and_its_term_is_checked_in_every_commit(url: str) -> None:
    async with opened(url) as one, opened(url) as other:
        boots = [await one.enlist("one"), await other.enlist("other")]
        first = await one.take_over(EMPTY, GroupAuthor("one", boots[0]), 30.0)
        assert (first.written, first.author) == (True, GroupAuthor("one", boots[0], 1))
        refused = await other.take_over(first.mark, GroupAuthor("other", boots[1]), 30.0)
        assert (refused.written, refused.author) == (False, first.author), "the holder is alive"
        assert (await one.renew(first.author)).alive
        assert not (await other.take_over(EMPTY, GroupAuthor("other", boots[1]), 0.0)).written, (
            "not seen everything"
        )
        second = await other.take_over(first.mark, GroupAuthor("other", boots[1]), 0.0)
        assert (second.written, second.author.term) == (True, 2)
        renewal = await one.renew(first.author)
        assert (renewal.alive, renewal.holder) == (False, second.author)
        stale = group(second.mark, "a")  # at the right number, and all the same
        stale.author = first.author
        assert not (await one.commit(stale)).written
        assert not (await one.settle(second.mark, stale.id, first.author)).written
        assert await one.mark() == second.mark, "and takes no number either"
        assert await one.enlist("other") == boots[1] + 1
        assert not (await other.renew(second.author)).alive, "a later boot of the same name"


async def test_a_database_of_another_schema_is_left_alone(url: str) -> None:
    async with opened(url):
        pass
    connection = await connect(url, {})
    await connection.execute("UPDATE alembic_version SET version_num = '9999'")
    await connection.execute(f"UPDATE usable SET oldest_level = {SUPPORTED.highest + 1}")
    await connection.close()
    with pytest.raises(IntegrityError, match="schema 9999, which programs of level 3 and above can use"):
        await PostgresEngine.open(url)


async def test_servers_that_begin_at_once_make_one_database(url: str) -> None:
    engines = await asyncio.gather(*(PostgresEngine.open(url) for _ in range(4)))
    try:
        assert len({await engine.lineage() for engine in engines}) == 1
    finally:
        for engine in engines:
            await engine.close()


async def _definition(url: str) -> list[tuple[object, ...]]:
    connection = await connect(url, LOADER)
    try:
        columns = await connection.fetch(
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM"
            " information_schema.columns WHERE table_schema = 'public' ORDER BY 1, 2"
        )
        functions = await connection.fetch(
            "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'public'::regnamespace ORDER BY 1"
        )
        indexes = await connection.fetch(
            "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' ORDER BY 1, 2"
        )
        return [tuple(row) for row in (*columns, *functions, *indexes)]
    finally:
        await connection.close()


async def _set_back(url: str) -> None:
    """As the version that knew schema 0006 left it; its functions were others."""
    connection = await connect(url, LOADER)
    try:
        await connection.execute("ALTER TABLE meta DROP COLUMN replaced")
        await connection.execute("UPDATE alembic_version SET version_num = '0006'")
        await connection.execute("DROP TABLE seats")
        await connection.execute("DROP TABLE heard")
        await connection.execute("DROP TABLE usable")
        for column in ("agents", "controllers", "bus", "bus_connected", "lowest_level", "highest_level"):
            await connection.execute(f"ALTER TABLE servers DROP COLUMN {column}")
        await connection.execute("DROP FUNCTION settle_group")
        await connection.execute("CREATE FUNCTION settle_group(a integer) RETURNS integer RETURN a")
    finally:
        await connection.close()


async def _renewed(url: str, moment: str) -> None:
    connection = await connect(url, LOADER)
    try:
        await connection.execute(f"UPDATE servers SET renewed_at = {moment}")
    finally:
        await connection.close()


async def test_a_database_of_an_older_version_is_migrated_once_when_no_server_uses_it(url: str) -> None:
    async with opened(url) as engine:
        before = EMPTY
        await engine.commit(group(before, "x"))
        boot = await engine.enlist("old")
    expected = await _definition(url)
    await _set_back(url)
    await _renewed(url, "now() + interval '1 hour'")
    with pytest.raises(Unavailable, match=r"from 0006 to 0011 only while no server .* old does"):
        await PostgresEngine.open(url)
    async with asyncio.timeout(DEADLINE_SECONDS):
        connection = await connect(url, LOADER)
        try:
            assert await connection.fetchval("SELECT version_num FROM alembic_version") == "0006"
        finally:
            await connection.close()
        await _renewed(url, "'epoch'")
        several = await asyncio.gather(*(PostgresEngine.open(url) for _ in range(3)))
    try:
        assert await _definition(url) == expected
        assert (await several[0].mark()).number == 1
        assert await several[1].enlist("old") == boot + 1
        assert (await several[2].commit(group(await several[2].mark(), "y"))).written
    finally:
        for engine in several:
            await engine.close()


async def test_a_reader_that_stood_still_in_its_snapshot_is_told_that_the_database_cannot_be_used(
    url: str,
) -> None:
    async def stands_still(engine: PostgresEngine) -> None:
        async with engine._reading(snapshot=True) as reader:
            backend = Path(f"/proc/{await reader.fetchval('SELECT pg_backend_pid()')}")
            await reader.execute("SET LOCAL idle_in_transaction_session_timeout = '100ms'")
            deadline = time.monotonic() + DEADLINE_SECONDS
            while backend.exists():  # the whole process stands still, until it is cut off
                assert time.monotonic() < deadline
                time.sleep(0.02)  # noqa: ASYNC251
            await asyncio.sleep(0)

    async with opened(url) as engine:
        with pytest.raises(Unavailable):
            await stands_still(engine)
        assert (await engine.mark()).number == 0, "the next reader has another connection"


def test_what_the_driver_makes_of_an_end_that_was_announced_is_no_defect_of_ours() -> None:
    with pytest.raises(Unavailable), translated():
        raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")
