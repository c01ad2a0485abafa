"""A group of durable changes in one call of each engine, against a call for each statement.

The reference writes the same rows into a database file of the same schema, statement by statement through an
asynchronous driver, as the store did before a group was one call: begin, six kinds of rows, commit. All sync
every commit, on one disk, in turns. The note has the processor time of one change, PostgreSQL's included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

import aiosqlite

from bench import servers
from bench.figures import Effort, Row, against, alone
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.store.engine import DatabaseMark, GroupOutcome, LogRow, ResourceRow, WriteGroup
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.engines.sqlite import SqliteEngine
from fleetplane.kernel.store.settings import StoreSettings
from tools.run_cluster import Cluster, Ports

SIZES = (16, 64)
BODY = bytes(700)
"""What a GPU with three conditions takes."""
ENTRY = bytes(400)
MUST = {"SQLite": 1.0, "PostgreSQL": 0.5}
"""A group for PostgreSQL crosses to another process and back."""
Commit = Callable[[WriteGroup], Awaitable[object]]
GROUP = "INSERT INTO groups VALUES (?, ?, ?, ?, ?, 0, '', 0, ?, 0)"
PUT = (
    "INSERT INTO resources VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, scope, name)"
    " DO UPDATE SET revision = excluded.revision, body = excluded.body"
)
LOG = "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
KIND = "INSERT INTO kinds VALUES (?, ?) ON CONFLICT (kind) DO UPDATE SET revision = excluded.revision"
AUDIT = "INSERT INTO audit VALUES (?, ?, ?)"


def _group(before: DatabaseMark, size: int) -> WriteGroup:
    first, seq = before.revision + 1, before.audit_seq + 1
    link = audit.GENESIS
    after = replace(
        before,
        number=before.number + 1,
        revision=before.revision + size,
        audit_seq=before.audit_seq + size,
        audit_hash=link,
    )
    return WriteGroup(
        id=before.number.to_bytes(16),
        before=before,
        after=after,
        puts=[ResourceRow("gpu", "", f"gpu-{n:04}", first + n, BODY) for n in range(size)],
        log=[LogRow(first + n, 0, "MODIFIED", "gpu", "", BODY) for n in range(size)],
        kinds=[("gpu", after.revision)],
        audit=[audit.Row(seq=seq + n, hash=link, entry=ENTRY) for n in range(size)],
    )


def _by_statement(connection: aiosqlite.Connection) -> Commit:
    async def commit(group: WriteGroup) -> None:
        after = group.after
        await connection.execute("BEGIN IMMEDIATE")
        stand = (after.number, after.revision, after.compacted, after.audit_seq, after.audit_hash, group.id)
        await connection.execute(GROUP, stand)
        await connection.executemany(PUT, group.puts)
        await connection.executemany(LOG, [(after.number, n, *row) for n, row in enumerate(group.log)])
        await connection.executemany(KIND, group.kinds)
        await connection.executemany(AUDIT, [(row.seq, row.hash, row.entry) for row in group.audit])
        await connection.execute("COMMIT")

    return commit


class Writer:
    """One database that is written to, and what each round of that came to."""

    def __init__(self, commit: Commit, mark: DatabaseMark, others: Callable[[], float] = lambda: 0.0) -> None:
        self._commit = commit
        self._mark = mark
        self._others = others
        self.rates: list[float] = []
        self.costs: list[float] = []

    async def round(self, size: int, seconds: float) -> None:
        """Changes per second, and the processor time of each."""
        begun, used, groups = time.perf_counter(), time.process_time() + self._others(), 0
        while (elapsed := time.perf_counter() - begun) < seconds:
            group = _group(self._mark, size)
            outcome = await self._commit(group)
            if isinstance(outcome, GroupOutcome) and not outcome.written:
                raise RuntimeError("a group was not written")
            self._mark, groups = group.after, groups + 1
        self.rates.append(groups * size / elapsed)
        self.costs.append((time.process_time() + self._others() - used) / (groups * size))


async def _measure(directory: Path, url: str, database: int, size: int, effort: Effort) -> Sequence[Row]:
    async with AsyncExitStack() as stack:

        async def opened(name: str) -> SqliteEngine:
            engine = await SqliteEngine.open(StoreSettings(path=directory / f"{name}-{size}.db"))
            stack.push_async_callback(engine.close)
            return engine

        ours, reference = await opened("ours"), await opened("reference")
        postgres = await PostgresEngine.open(url)
        stack.push_async_callback(postgres.close)
        connection = await stack.enter_async_context(
            aiosqlite.connect(directory / f"reference-{size}.db", isolation_level=None)
        )
        await connection.execute("PRAGMA synchronous = FULL")
        writers = {
            "SQLite": Writer(ours.commit, await ours.mark()),
            "PostgreSQL": Writer(
                postgres.commit, await postgres.mark(), lambda: servers.family_cpu_seconds(database)
            ),
            "reference": Writer(_by_statement(connection), await reference.mark()),
        }
        for _ in range(effort.rounds):
            for one in writers.values():
                await one.round(size, effort.seconds)
    best = {name: (max(one.rates), min(one.costs) * 1e6) for name, one in writers.items()}
    return [
        against(
            figure=f"Durable changes in groups of {size}, {engine}",
            ours=best[engine][0],
            reference=best["reference"][0],
            must=must,
            show=lambda rate: f"{rate:,.0f}/s",
            note=f"{best[engine][1]:.0f} µs of processor time each, against {best['reference'][1]:.0f} µs",
        )
        for engine, must in MUST.items()
    ]


def measure(effort: Effort) -> Sequence[Row]:
    with servers.scratch() as directory, ExitStack() as stack:
        directory.chmod(0o755)
        cluster = Cluster(directory, Ports(0), stack)
        cluster.start_database()
        url = cluster.environment["FLEETPLANE_STORE__URL"]
        database = int((directory / "database" / "data" / "postmaster.pid").read_text().split()[0])
        found = [asyncio.run(_measure(directory, url, database, size, effort)) for size in SIZES]
    return [row for rows in found for row in rows]


if __name__ == "__main__":
    alone(measure, __doc__)
