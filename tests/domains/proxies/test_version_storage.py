"""What an edit of a workspace with many hosts leaves in the store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from support.instances.agents_rig import BOSS, agents_rig

HOSTS, EDITS = 40, 12


async def test_a_configuration_version_is_stored_once_and_not_in_the_event_log(tmp_path: Path) -> None:
    async with agents_rig(tmp_path) as fleet:
        for number in range(HOSTS):
            host = await fleet.host(f"h{number}.example")
        before = fleet.store.revision
        for number in range(EDITS):
            given = {"name": f"edited-{number}"}
            await fleet.hosts.update(fleet.scope, host.name, given, if_match=None, actor=BOSS)
        with closing(sqlite3.connect(f"file:{tmp_path}/state.db?mode=ro", uri=True)) as database:
            logged = dict(
                database.execute(
                    "SELECT kind, max(length(body)) FROM log WHERE revision > ? GROUP BY kind", (before,)
                )
            )
            (stored,) = database.execute(
                "SELECT max(length(body)) FROM resources WHERE kind = 'proxy-config-version'"
            ).fetchone()
    assert stored > HOSTS * 50, "a version names every host"
    assert logged["proxy-config-version"] < 600
    assert logged["proxy-config-part"] < 600
