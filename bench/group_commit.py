"""A group of durable changes in one call of the engine, against a call for each statement.

The reference writes the same rows into a database of the same schema, statement by statement through an
asynchronous driver, as the store did before a group was one call: begin, six kinds of rows, commit. Both sync
every commit, in one process, in turns. The note has the processor time of one change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import aiosqlite

from bench import servers
from bench.figures import Effort, Row, against, alone
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.store.engine import LogRow, Mark, ResourceRow, WriteGroup
from fleetplane.kernel.store.engines.sqlite import SqliteEngine
from fleetplane.kernel.store.settings import StoreSettings

SIZES = (16, 64)
BODY = bytes(700)
"""What a GPU with three conditions takes."""
ENTRY = bytes(400)
MUST = 1.0
Commit = Callable[[WriteGroup], Awaitable[object]]
GROUP = "INSERT INTO groups VALUES (?, ?, ?, ?, ?, 0, '', 0, ?, 0)"
PUT = (
    "INSERT INTO resources VALUES (?, ?, ?, ?, ?) ON CONFLICT (kind, scope, name)"
    " DO UPDATE SET revision = excluded.revision, body = excluded.body"
)
LOG = "INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
KIND = "INSERT INTO kinds VALUES (?, ?) ON CONFLICT (kind) DO UPDATE SET revision = excluded.revision"
AUDIT = "INSERT INTO audit VALUES (?, ?, ?)"


def _group(before: Mark, size: int) -> WriteGroup:
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


async def _round(commit: Commit, mark: Mark, size: int, seconds: float) -> tuple[Mark, float, float]:
    """Changes per second, and the processor time of each."""
    begun, used, groups = time.perf_counter(), time.process_time(), 0
    while (elapsed := time.perf_counter() - begun) < seconds:
        group = _group(mark, size)
        await commit(group)
        mark, groups = group.after, groups + 1
    return mark, groups * size / elapsed, (time.process_time() - used) / (groups * size)


async def _measure(directory: Path, size: int, effort: Effort) -> Row:
    paths = [directory / f"{name}-{size}.db" for name in ("ours", "reference")]
    ours, reference = [await SqliteEngine.open(StoreSettings(path=path)) for path in paths]
    try:
        marks = [await ours.mark(), await reference.mark()]
        async with aiosqlite.connect(paths[1], isolation_level=None) as connection:
            await connection.execute("PRAGMA synchronous = FULL")
            commits: Sequence[Commit] = (ours.commit, _by_statement(connection))
            rates: tuple[list[float], list[float]] = ([], [])
            costs: tuple[list[float], list[float]] = ([], [])
            for _ in range(effort.rounds):
                for which, commit in enumerate(commits):
                    marks[which], rate, cost = await _round(commit, marks[which], size, effort.seconds)
                    rates[which].append(rate)
                    costs[which].append(cost)
    finally:
        await ours.close()
        await reference.close()
    return against(
        figure=f"Durable changes in groups of {size}",
        ours=max(rates[0]),
        reference=max(rates[1]),
        must=MUST,
        show=lambda rate: f"{rate:,.0f}/s",
        note="{:.0f} µs of processor time each, against {:.0f} µs".format(
            *(min(each) * 1e6 for each in costs)
        ),
    )


def measure(effort: Effort) -> Sequence[Row]:
    with servers.scratch() as directory:
        return [asyncio.run(_measure(directory, size, effort)) for size in SIZES]


if __name__ == "__main__":
    alone(measure, __doc__)
