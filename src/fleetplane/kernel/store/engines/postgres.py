"""The PostgreSQL engine: several servers on one database, all of which may write.

A group is one call of a function in the database (`postgres_schema.py`). Writing, renewing and reading have
connections of their own, so that none waits for another. A commit is never cancelled nor given a time-out:
with a synchronous standby missing, either would make it visible although it is not replicated. Whoever
goes away closes the socket, and the doubt is settled later.
"""

# ruff: noqa: S608  # every part of a statement is a constant of this module
from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import asyncpg

from fleetplane import __version__
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.store.engine import (
    ClaimRow,
    DatabaseMark,
    GroupAuthor,
    GroupOutcome,
    GroupPage,
    HistoryPage,
    LogRow,
    ResourceRow,
    StoreContents,
    WriteGroup,
)
from fleetplane.kernel.store.engines.postgres_groups import (
    CHANGE,
    next_groups,
    outcome_of,
    read_mark,
    read_page,
)
from fleetplane.kernel.store.engines.postgres_line import (
    LOADER,
    PostgresCallLink,
    connect,
    given_up,
    one_moment,
    translated,
)
from fleetplane.kernel.store.engines.postgres_schema import TAKE_LOCK, bring_up_to_date
from fleetplane.kernel.store.servers.engine import Drafting, LeaseRenewal
from fleetplane.kernel.store.servers.level import SUPPORTED, Levels

READERS = 3
LOAD_PAGE_ROWS = 1000
WRITER = {"lock_timeout": "5000", "tcp_user_timeout": "3000", "idle_in_transaction_session_timeout": "1000"}
"""In milliseconds. A lock is waited for longer than it takes to free it from one who went away."""
READER = {**LOADER, "statement_timeout": "10000", "idle_in_transaction_session_timeout": "1000"}

# Columns by name, always: a newer server may add some while this one runs.
_CLAIMS = f"SELECT {', '.join(ClaimRow._fields)} FROM claims"
_RESOURCES = f"SELECT {', '.join(ResourceRow._fields)} FROM resources"
_COMMIT = f"SELECT * FROM commit_group({', '.join(f'${n}' for n in range(1, 44))})"


class PostgresEngine:
    def __init__(self, url: str, readers: asyncpg.Pool[Any]) -> None:
        self._url = url
        self._readers = readers
        self._writer = PostgresCallLink(url, WRITER)
        self._seat = PostgresCallLink(url, WRITER)

    def __repr__(self) -> str:
        return "<PostgresEngine>"

    @classmethod
    async def open(cls, url: str, *, first_revision: int = 0, levels: Levels | None = None) -> Self:
        """Make or migrate the tables, if that is needed; older servers may run on meanwhile.

        Refuses what a program with these levels cannot use.
        """
        with translated():
            await bring_up_to_date(url, first_revision, levels or SUPPORTED)
            readers = await asyncpg.create_pool(
                url, min_size=1, max_size=READERS, server_settings=READER, reset=_given_back
            )
        return cls(url, readers)

    async def close(self) -> None:
        await self._writer.close()
        await self._seat.close()
        self._readers.terminate()

    # Writing.

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        return outcome_of(await self._writer.row(_COMMIT, *_arguments(group)))

    async def commit_alone(self, *, after: int, limit: int, draft: Drafting) -> GroupOutcome | None:
        """The lock is this connection's: one that is idle for a second, or dead for three, loses it."""

        async def work(connection: Any) -> GroupOutcome | None:
            async with connection.transaction():
                await connection.execute(TAKE_LOCK)
                page = await next_groups(connection, after, limit) or await read_page(
                    connection, after, limit
                )
                last = page.groups[-1].mark.number if page.groups else after
                if last != page.head.number or (group := await draft(page)) is None:
                    return None
                return outcome_of(await connection.fetchrow(_COMMIT, *_arguments(group)))

        found: GroupOutcome | None = await self._writer.call(work)
        return found

    async def settle(self, before: DatabaseMark, group_id: bytes, author: GroupAuthor) -> GroupOutcome:
        row = await self._writer.row(
            "SELECT * FROM settle_group($1, $2, $3, $4, $5)",
            before.number,
            group_id,
            author.term,
            author.server,
            author.boot,
        )
        return outcome_of(row)

    async def trim(self, limit: int) -> int:
        """Beside the writer, and not under its lock."""
        async with self._reading() as reader:
            compacted = (await read_mark(reader)).compacted
            first = await reader.fetchval(
                "SELECT number FROM groups WHERE revision >= $1 ORDER BY number LIMIT 1", compacted
            )
            gone = await reader.fetch(
                "DELETE FROM log WHERE (number, position) IN (SELECT number, position FROM log"
                " WHERE number < $1 ORDER BY number, position LIMIT $2) RETURNING number",
                first,
                limit,
            )
            left = await reader.fetchval("SELECT min(number) FROM log")
            keep = first if left is None else min(first, left)
            await reader.execute("DELETE FROM groups WHERE number < $1", keep)
            return len(gone)

    # Which server writes.

    async def enlist(self, server: str, levels: Levels = SUPPORTED) -> int:
        row = await self._seat.row(
            "INSERT INTO servers (id, boot, renewed_at, version, lowest_level, highest_level)"
            " VALUES ($1, 1, clock_timestamp(), $2, $3, $4)"
            " ON CONFLICT (id) DO UPDATE SET boot = servers.boot + 1, renewed_at = clock_timestamp(),"
            " version = excluded.version, lowest_level = excluded.lowest_level,"
            " highest_level = excluded.highest_level RETURNING boot",
            server,
            __version__,
            *levels,
        )
        return int(row["boot"])

    async def renew(self, author: GroupAuthor, number: int = 0) -> LeaseRenewal:
        row = await self._seat.row(
            "WITH seat AS (SELECT term, server, boot FROM seats ORDER BY term DESC LIMIT 1),"
            " renewed AS (UPDATE servers SET renewed_at = clock_timestamp(), number = $4"
            " WHERE id = $1 AND boot = $2 AND ($3 = 0 OR $3 = (SELECT term FROM seat)) RETURNING id)"
            " SELECT EXISTS (SELECT 1 FROM renewed) AS alive, coalesce(server, '') AS server,"
            " coalesce(boot, 0) AS boot, coalesce(term, 0) AS term,"
            " (extract(epoch FROM clock_timestamp()) * 1000000000)::bigint AS now_ns"
            " FROM (SELECT) AS one LEFT JOIN seat ON true",
            *author,
            number,
        )
        holder = GroupAuthor(row["server"], row["boot"], row["term"])
        return LeaseRenewal(alive=row["alive"], holder=holder, now_ns=row["now_ns"])

    async def take_over(self, before: DatabaseMark, author: GroupAuthor, life_seconds: float) -> GroupOutcome:
        row = await self._seat.row(
            "SELECT * FROM take_over($1, $2, $3, $4)", before.number, author.server, author.boot, life_seconds
        )
        return outcome_of(row)

    async def leave(self, author: GroupAuthor) -> None:
        await self._seat.row(
            "UPDATE servers SET renewed_at = 'epoch' WHERE id = $1 AND boot = $2 RETURNING id", *author[:2]
        )

    async def living(self, life_seconds: float) -> Mapping[str, int]:
        query = (
            "SELECT id, boot FROM servers WHERE renewed_at > clock_timestamp() - make_interval(secs => $1)"
        )
        async with self._reading() as reader:
            return dict(await reader.fetch(query, life_seconds))

    async def supported(self, life_seconds: float) -> Sequence[Levels]:
        query = (
            "SELECT lowest_level, highest_level FROM servers"
            " WHERE renewed_at > clock_timestamp() - make_interval(secs => $1)"
        )
        async with self._reading() as reader:
            return [Levels(*row) for row in await reader.fetch(query, life_seconds)]

    # Who was heard. Beside the log: these rows are no part of the store.

    async def hear(self, channel: str, seconds_ago: Mapping[str, float]) -> None:
        query = (
            "INSERT INTO heard AS h (channel, agent, at)"
            " SELECT $1, n.agent, clock_timestamp() - make_interval(secs => n.ago)"
            " FROM unnest($2::text[], $3::float8[]) AS n (agent, ago) ORDER BY n.agent"
            " ON CONFLICT (channel, agent) DO UPDATE SET at = excluded.at WHERE h.at < excluded.at"
        )
        async with self._reading() as reader:
            await reader.execute(query, channel, list(seconds_ago), list(seconds_ago.values()))

    async def heard(self, channel: str) -> Mapping[str, float]:
        query = (
            "SELECT agent, greatest(0, extract(epoch FROM clock_timestamp() - at))::float8 FROM heard"
            " WHERE channel = $1"
        )
        async with self._reading() as reader:
            return dict(await reader.fetch(query, channel))

    async def forget_heard(self, channel: str, agents: Sequence[str]) -> None:
        async with self._reading() as reader:
            await reader.execute(
                "DELETE FROM heard WHERE channel = $1 AND agent = ANY($2::text[])", channel, list(agents)
            )

    async def trim_heard(self, channel: str, older_seconds: float) -> None:
        query = "DELETE FROM heard WHERE channel = $1 AND at < clock_timestamp() - make_interval(secs => $2)"
        async with self._reading() as reader:
            await reader.execute(query, channel, older_seconds)

    # Reading.

    @asynccontextmanager
    async def _reading(self, *, snapshot: bool = False) -> AsyncIterator[Any]:
        """A connection; with a snapshot, all that is read through it is of one moment."""
        with translated():
            async with self._readers.acquire() as reader, given_up(reader):
                if not snapshot:
                    yield reader
                    return
                async with one_moment(reader):
                    yield reader

    async def mark(self) -> DatabaseMark:
        async with self._reading() as reader:
            return await read_mark(reader)

    async def lineage(self) -> str:
        async with self._reading() as reader:
            return str(await reader.fetchval("SELECT lineage FROM meta"))

    async def replaced(self) -> Sequence[str]:
        async with self._reading() as reader:
            found: str = await reader.fetchval("SELECT replaced FROM meta")
            return found.split()

    @asynccontextmanager
    async def load(self, kinds: Sequence[str]) -> AsyncIterator[StoreContents]:
        with translated():
            reader = await connect(self._url, LOADER)
            try:
                async with given_up(reader), one_moment(reader):
                    found = await reader.fetchrow("SELECT lineage, first_revision FROM meta")
                    if found is None:
                        raise IntegrityError("the database has no lineage")
                    yield StoreContents(
                        mark=await read_mark(reader),
                        lineage=found["lineage"],
                        first_revision=found["first_revision"],
                        kinds=dict(await reader.fetch("SELECT kind, revision FROM kinds")),
                        claims=[ClaimRow(*row) for row in await reader.fetch(_CLAIMS)],
                        resources=_resources(reader, kinds),
                    )
            finally:
                reader.terminate()

    async def resource(self, kind: str, scope: str, name: str) -> ResourceRow | None:
        query = f"{_RESOURCES} WHERE kind = $1 AND scope = $2 AND name = $3"
        async with self._reading() as reader:
            row = await reader.fetchrow(query, kind, scope, name)
            return None if row is None else ResourceRow(*row)

    async def groups(self, *, after: int, limit: int) -> GroupPage:
        async with self._reading() as reader:
            page = await next_groups(reader, after, limit)
        if page is not None:
            return page
        async with self._reading(snapshot=True) as reader:
            return await read_page(reader, after, limit)

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        within = "kind = $1 AND revision > $2 AND revision <= $3"
        query = f"SELECT {CHANGE} FROM log WHERE {within} ORDER BY revision"
        async with self._reading(snapshot=True) as reader:  # one for the horizon and the events
            compacted = (await read_mark(reader)).compacted
            given = (kind, max(after, compacted), until)
            found = [LogRow(*row) for row in await reader.fetch(f"{query} LIMIT $4", *given, limit + 1)]
            if (complete := len(found) <= limit) is False:
                last = found[-1].transaction
                whole = [row for row in found if row.transaction != last]
                if not whole:  # one that is larger than a page
                    rows = [LogRow(*row) for row in await reader.fetch(query, *given)]
                    whole = [row for row in rows if row.transaction == rows[0].transaction]
                found = whole
        return HistoryPage(compacted=compacted, events=found, complete=complete)

    async def history_bytes(self) -> int:
        async with self._reading(snapshot=True) as reader:
            query = "SELECT coalesce(sum(length(body)), 0)::bigint FROM log WHERE revision > $1"
            return int(await reader.fetchval(query, (await read_mark(reader)).compacted))

    async def history_horizon(self, size_bytes: int) -> int:
        query = (
            "SELECT min(revision) FROM (SELECT revision, sum(length(body)) OVER (ORDER BY revision) AS size"
            " FROM log WHERE revision > $1) AS running WHERE size >= $2"
        )
        async with self._reading(snapshot=True) as reader:
            return await reader.fetchval(query, (await read_mark(reader)).compacted, size_bytes) or 0

    async def secret(self, name: str) -> bytes | None:
        async with self._reading() as reader:
            found: bytes | None = await reader.fetchval("SELECT blob FROM secrets WHERE name = $1", name)
            return found

    async def secret_names(self, prefix: str) -> Sequence[str]:
        query = 'SELECT name FROM secrets WHERE starts_with(name, $1) ORDER BY name COLLATE "C"'
        async with self._reading() as reader:
            return [row["name"] for row in await reader.fetch(query, prefix)]

    async def audit_row(self, seq: int) -> audit.Row | None:
        async with self._reading() as reader:
            row = await reader.fetchrow("SELECT seq, hash, entry FROM audit WHERE seq = $1", seq)
            return None if row is None else audit.Row(**row)

    async def audit(self, *, after: int = 0) -> AsyncGenerator[Sequence[audit.Row], None]:
        """In pages by number: nothing holds a snapshot for as long as its reader likes."""
        query = "SELECT seq, hash, entry FROM audit WHERE seq > $1 ORDER BY seq LIMIT $2"
        while True:
            async with self._reading() as reader:
                page = [audit.Row(**row) for row in await reader.fetch(query, after, LOAD_PAGE_ROWS)]
            if not page:
                return
            yield page
            after = page[-1].seq


async def _given_back(_reader: Any) -> None:
    """Nothing of a session outlives its statements, so there is nothing to ask the database to undo."""


async def _resources(reader: Any, kinds: Sequence[str]) -> AsyncGenerator[Sequence[ResourceRow], None]:
    cursor = await reader.cursor(f"{_RESOURCES} WHERE kind = ANY($1)", list(kinds))
    while page := await cursor.fetch(LOAD_PAGE_ROWS):
        yield [ResourceRow(*row) for row in page]


def _arguments(group: WriteGroup) -> list[object]:
    """In the order of the function's."""
    after, author, cut = group.after, group.author, group.cut
    return [
        group.before.number,
        author.term,
        author.server,
        author.boot,
        group.id,
        after.revision,
        after.compacted,
        after.audit_seq,
        after.audit_hash,
        *_columns(group.puts, 5),
        *_columns(group.deletes, 3),
        *_columns(group.log, 6),
        *_columns(group.kinds, 2),
        *_columns(group.releases, 4),
        *_columns(group.claims, 5),
        *_columns(group.secrets, 3),
        *_columns(group.secret_deletes, 1),
        *_columns([(row.seq, row.hash, row.entry) for row in group.audit], 3),
        None if cut is None else cut.seq,
        None if cut is None else cut.checkpoint,
    ]


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> list[list[object]]:
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]
