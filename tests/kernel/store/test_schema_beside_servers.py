"""A newer release migrates the database while servers of an older one run on it, if the migration says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from alembic.config import Config
from support.shared.enginekit import group
from support.shared.postgres_server import PostgresServer

from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.store import schema
from fleetplane.kernel.store.engine import GroupAuthor
from fleetplane.kernel.store.engines import postgres_copy, postgres_schema
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.engines.postgres_line import LOADER, connect
from fleetplane.kernel.store.engines.postgres_servers import seen
from fleetplane.kernel.store.migrations import runner
from fleetplane.kernel.store.servers.level import Levels

DEADLINE_SECONDS = 60.0
KNOWN = schema.SCHEMA_REVISION
FIRST, NEXT = Levels(1, 1), Levels(1, 2)
STEP = """
from alembic import op

revision = "{revision}"
down_revision = "{before}"
branch_labels = depends_on = None
{says}

def upgrade() -> None:
    for table in ("resources", "claims", "groups", "log", "kinds", "secrets", "audit", "servers", "seats"):
        op.execute(f"ALTER TABLE {{table}} ADD COLUMN of_{revision} text NOT NULL DEFAULT ''")
"""


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    return postgres.database()


class Releases:
    """Turns this process into a later release, and back."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self._usual = runner.configuration

    def older(self) -> None:
        self._patch.setattr(schema, "SCHEMA_REVISION", KNOWN)
        self._patch.setattr(runner, "configuration", self._usual)

    def newer(self, revision: str = "9001", before: str = KNOWN, says: str = "oldest_level = 1") -> None:
        """One with one more migration."""
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"{revision}.py").write_text(STEP.format(revision=revision, before=before, says=says))

        def configuration(connection: object = None) -> Config:
            config = self._usual(connection)  # type: ignore[arg-type]
            own = Path(runner.__file__).parent / "versions"
            config.set_main_option("version_locations", f"{own}:{self._folder}")
            return config

        self._patch.setattr(schema, "SCHEMA_REVISION", revision)
        self._patch.setattr(runner, "configuration", configuration)


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Releases:
    return Releases(tmp_path / "versions", monkeypatch)


@asynccontextmanager
async def opened(url: str, levels: Levels = FIRST) -> AsyncIterator[PostgresEngine]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        engine = await PostgresEngine.open(url, levels=levels)
        try:
            yield engine
        finally:
            await engine.close()


async def works(engine: PostgresEngine, author: GroupAuthor, name: str) -> None:
    """Everything that servers do all the time."""
    before = await engine.mark()
    written = group(before, name)
    written.author = author
    assert (await engine.renew(author, before.number)).alive
    assert (await engine.commit(written)).written
    async with engine.load(["thing"]) as contents:
        found = [row.name async for page in contents.resources for row in page]
    assert name in found
    assert (await engine.groups(after=before.number, limit=10)).groups[0].log == written.log
    row = written.puts[0]
    assert await engine.resource(row.kind, row.scope, row.name) == row
    await engine.hear("channel", {"agent": 0.0})


async def renewed(url: str, moment: str) -> None:
    connection = await connect(url, LOADER)
    try:
        await connection.execute(f"UPDATE servers SET renewed_at = {moment}")
    finally:
        await connection.close()


async def test_an_older_server_works_on_and_starts_again_on_tables_that_were_added_to(
    url: str, releases: Releases
) -> None:
    async with opened(url) as old:
        author = GroupAuthor("old", await old.enlist("old", FIRST))
        await works(old, author, "a")  # which prepares every statement
        releases.newer()
        async with opened(url, NEXT) as new:
            await works(old, author, "b")
            other = GroupAuthor("new", await new.enlist("new", NEXT))
            await works(new, other, "c")
            await works(old, author, "d")
            assert set(await new.supported(DEADLINE_SECONDS)) == {FIRST, NEXT}
            assert [(one.name, one.level, one.supported_level) for one in await seen(url)] == [
                ("new", 1, 2),
                ("old", 1, 1),
            ]
            releases.older()
            async with opened(url) as again:
                author = GroupAuthor("old", await again.enlist("old", FIRST))
                await works(again, author, "e")
                assert (await again.take_over(await again.mark(), author, 0.0)).written
            releases.newer()
            async with opened(url, NEXT) as again:
                await works(again, other, "f")


async def test_a_migration_that_older_programs_cannot_live_with_waits_for_the_last_of_them(
    url: str, releases: Releases
) -> None:
    async with opened(url) as old:
        await old.enlist("old", FIRST)
        await old.enlist("able", NEXT)
        await renewed(url, "now() + interval '1 hour'")
        releases.newer(says="oldest_level = 2")
        with pytest.raises(Unavailable, match=r"only while every server supports level 2, and old does not"):
            await PostgresEngine.open(url, levels=NEXT)
        await old.leave(GroupAuthor("old", 1))
        async with opened(url, NEXT):
            pass
    releases.older()
    with pytest.raises(IntegrityError, match=f"9001, which programs of level 2 .* knows schema {KNOWN}"):
        await PostgresEngine.open(url, levels=FIRST)
    async with opened(url, NEXT):
        pass


async def test_a_migration_that_says_nothing_waits_until_no_server_runs(url: str, releases: Releases) -> None:
    async with opened(url, NEXT) as old:
        await old.enlist("old", NEXT)
        await renewed(url, "now() + interval '1 hour'")
        releases.newer()
        releases.newer("9002", "9001", says="")
        with pytest.raises(
            Unavailable, match=r"to 9002 only while no server uses the database, and old does"
        ):
            await PostgresEngine.open(url, levels=NEXT)
        assert await old.mark()
        await old.leave(GroupAuthor("old", 1))
    async with opened(url, NEXT):
        pass


async def test_whoever_copies_whole_tables_neither_migrates_under_servers_nor_works_on_a_newer_schema(
    url: str, releases: Releases
) -> None:
    async with opened(url) as old:
        await old.enlist("old", FIRST)
    await renewed(url, "now() + interval '1 hour'")
    releases.newer()
    with pytest.raises(Unavailable, match="only while no server uses the database, and old does"):
        await postgres_copy.look(url)
    async with opened(url, NEXT):
        pass
    releases.older()
    with pytest.raises(IntegrityError, match="schema 9001, which this version does not know"):
        await postgres_copy.look(url)


async def test_a_migration_does_not_make_everybody_wait_for_a_table_that_is_being_read(
    url: str, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_schema, "_TABLE_WAIT", "SET LOCAL lock_timeout = '100ms'")
    async with opened(url) as old:
        author = GroupAuthor("old", await old.enlist("old", FIRST))
        reader = await connect(url, LOADER)
        try:
            async with reader.transaction():
                await reader.fetchval("SELECT count(*) FROM resources")
                releases.newer()
                with pytest.raises(Unavailable, match=r"cannot be migrated: .*lock timeout"):
                    await PostgresEngine.open(url, levels=NEXT)
                await works(old, author, "a")
        finally:
            await reader.close()
        async with opened(url, NEXT):
            await works(old, author, "b")


async def test_a_call_that_has_other_arguments_in_a_newer_release_stays_for_the_older_one(
    url: str, releases: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = postgres_schema.SETTLE_GROUP.replace("n_boot bigint)", "n_boot bigint, n_more text)", 1)
    assert settle != postgres_schema.SETTLE_GROUP
    async with opened(url) as old:
        author = GroupAuthor("old", await old.enlist("old", FIRST))
        releases.newer()
        monkeypatch.setitem(postgres_schema.FUNCTIONS, "settle_group", settle)
        async with opened(url, NEXT):
            assert not (await old.settle(await old.mark(), b"x", author)).written
    releases.newer("9002", "9001", says="")  # and goes with the next that nobody lives through
    await renewed(url, "'epoch'")
    async with opened(url, NEXT):
        connection = await connect(url, LOADER)
        try:
            query = "SELECT count(*) FROM pg_proc WHERE proname = 'settle_group'"
            assert await connection.fetchval(query) == 1
        finally:
            await connection.close()


async def test_a_program_that_the_level_does_not_suit_changes_nothing(url: str, releases: Releases) -> None:
    async with opened(url) as old:
        await works(old, GroupAuthor("old", await old.enlist("old", FIRST)), "a")
    await renewed(url, "'epoch'")
    releases.newer()
    with pytest.raises(IntegrityError, match="the store is at level 1, and this program supports 2 to 3"):
        await PostgresEngine.open(url, levels=Levels(2, 3))
    connection = await connect(url, LOADER)
    try:
        assert await connection.fetchval("SELECT version_num FROM alembic_version") == KNOWN
    finally:
        await connection.close()
