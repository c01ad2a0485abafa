"""Servers of a cluster that are upgraded to the next release, one after the other, and back.

The next release is this one with what `next_release/sitecustomize.py` changes in it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
from support.cluster.load import Load
from support.cluster.members import DEADLINE_SECONDS, Member, ServerCluster

from fleetplane.domains.edge.nodes.groups import EDGE_GROUP
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.engines.postgres_line import connect
from fleetplane.kernel.store.engines.postgres_servers import seen
from fleetplane.kernel.store.servers.level import FIRST, LEVEL, SUPPORTED, Levels

NEXT_RELEASE = Path(__file__).parent / "next_release"
NEXT_LEVEL = SUPPORTED.highest + 1
EITHER = Levels(FIRST, NEXT_LEVEL)
SEAL = "seal"
"""The field that the next release has more."""
LOOK_SECONDS = 0.1


def is_next(member: Member) -> bool:
    return str(NEXT_RELEASE) in member.environment.get("PYTHONPATH", "")


def install(member: Member, *, next_release: bool) -> None:
    """What runs goes on; the next process is of that release."""
    usual = os.environ.get("PYTHONPATH")
    member.environment.pop("PYTHONPATH", None)
    if next_release:
        member.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(NEXT_RELEASE), usual)))


async def replaced(load: Load, member: Member, *, next_release: bool) -> None:
    """End a server and start it with the other release; returns when all acknowledge writes again."""
    before = member.process
    assert before is not None
    install(member, next_release=next_release)
    member.signal(signal.SIGTERM)
    assert await asyncio.to_thread(before.wait, DEADLINE_SECONDS) == 0, member.told()
    await load.cluster.until(lambda: member.process is not before)
    await load.goes_on()


async def refused(member: Member) -> str:
    """Start a server anew with this release, which ends by itself; what it said."""
    member.is_wanted = False
    before = member.process
    assert before is not None
    member.signal(signal.SIGTERM)
    await asyncio.to_thread(before.wait, DEADLINE_SECONDS)
    install(member, next_release=False)
    member.start()
    assert member.process is not None
    assert await asyncio.to_thread(member.process.wait, DEADLINE_SECONDS) != 0, member.told()
    return member.told()


async def risen(cluster: ServerCluster) -> None:
    """Return when the level is that of the next release."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while any(one.level < NEXT_LEVEL for one in await seen(cluster.url)):
            await asyncio.sleep(LOOK_SECONDS)


async def schema_of(cluster: ServerCluster) -> str:
    connection = await connect(cluster.url, {})
    try:
        return str(await connection.fetchval("SELECT version_num FROM alembic_version"))
    finally:
        await connection.close()


async def sealed_from_its_level_on(cluster: ServerCluster) -> tuple[int, int]:
    """Whatever was written of groups has the new field if, and only if, it was after the level had risen.

    How many changes came before, and after.
    """
    engine = await PostgresEngine.open(cluster.url, levels=EITHER)
    raised: list[int] = []
    sealed: dict[int, bool] = {}
    number = 0
    try:
        while (page := await engine.groups(after=number, limit=500)).groups:
            number = page.groups[-1].mark.number
            for row in (row for group in page.groups for row in group.log):
                if row.kind == LEVEL.name:
                    if msgspec.msgpack.decode(row.body)["spec"]["number"] >= NEXT_LEVEL:
                        raised.append(row.revision)
                elif row.kind == EDGE_GROUP.name:
                    sealed[row.revision] = bool(msgspec.msgpack.decode(row.body)["spec"].get(SEAL))
        async with engine.load([EDGE_GROUP.name]) as contents:
            async for rows in contents.resources:
                for one in rows:
                    held = bool(msgspec.msgpack.decode(one.body)["spec"].get(SEAL))
                    assert sealed[one.revision] == held
    finally:
        await engine.close()
    assert len(raised) == 1, raised
    wrong = [revision for revision, is_sealed in sealed.items() if is_sealed != (revision > raised[0])]
    assert not wrong, f"the level rose at {raised[0]}; with or without the field by mistake: {wrong[:10]}"
    after = sum(sealed.values())
    return len(sealed) - after, after
