"""Servers whose PostgreSQL fails over to a replica: a synchronous one, and one that lacks commits."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.shared import postgres_pair
from support.shared.postgres_pair import PostgresPair
from support.shared.server_processes import DEADLINE_SECONDS, Process, check, until

MISSING_SECONDS = float(os.environ.get("STANDBY_MISSING_SECONDS", "2"))
"""For how long the replica is away; a minute in the long form."""
LOST = "commits that were acknowledged are lost"
GAVE_UP = "its seat could not be renewed for"
"""What the active one says instead if nobody takes its writes for some seconds, as in a slow failover."""
NOTED = "had been acknowledged"


class Servers:
    """Two that write, and are started again when they end."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self.running: dict[str, Process] = {}
        self.everyone: list[Process] = []

    def start(self, name: str) -> None:
        self.running[name] = Process(self._url, self._folder, name, writes="always")
        self.everyone.append(self.running[name])

    def acknowledged(self) -> set[str]:
        return set().union(*(one.acknowledged() for one in self.everyone))

    async def keep(self) -> None:
        while True:
            for name, one in list(self.running.items()):
                if one.child.poll() is not None:
                    self.start(name)
            await asyncio.sleep(0.2)

    async def go_on(self) -> None:
        """Return when each was acknowledged something more."""
        before = self.acknowledged()
        await until(
            lambda: all(one.acknowledged() - before for one in self.running.values()),
            2 * DEADLINE_SECONDS,
            "nothing is written",
        )


@asynccontextmanager
async def servers(url: str, folder: Path) -> AsyncIterator[Servers]:
    found = Servers(url, folder)
    try:
        for name in ("one", "two"):
            found.start(name)
        yield found
    finally:
        for one in found.everyone:
            one.kill()


@asynccontextmanager
async def kept(found: Servers) -> AsyncIterator[None]:
    keeping = asyncio.create_task(found.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def _direct(url: str, pair: PostgresPair) -> str:
    """Of the replica alone."""
    return pair.replica.url(url.partition("?")[0].rpartition("/")[2])


@pytest.mark.timeout(900)
async def test_nothing_is_acknowledged_without_the_replica_and_all_that_was_is_there_after_a_failover(
    tmp_path: Path,
) -> None:
    with postgres_pair.pair(synchronous=True) as pair:
        url = pair.database()
        async with servers(url, tmp_path) as found, kept(found):
            await found.go_on()
            pair.replica.stop(signal.SIGQUIT)
            await asyncio.sleep(MISSING_SECONDS)  # commits wait
            pair.replica.start()
            await found.go_on()
            pair.replica.stop(signal.SIGQUIT)
            await asyncio.sleep(MISSING_SECONDS)
            # Whatever was acknowledged by now must be in the replica, as it was when it went away.
            pair.primary.stop(signal.SIGQUIT)
            pair.replica.start()
            pair.fail_over()
            await found.go_on()
        await check(_direct(url, pair), found.acknowledged())


@pytest.mark.timeout(900)
async def test_a_replica_that_lacks_commits_is_noticed_and_refused(tmp_path: Path) -> None:
    with postgres_pair.pair(synchronous=False) as pair:
        url = pair.database()
        async with servers(url, tmp_path) as found:
            await found.go_on()
            pair.replica.stop(signal.SIGQUIT)
            await found.go_on()  # what the replica does not know
            pair.primary.stop(signal.SIGQUIT)
            pair.replica.start()
            pair.fail_over()
            first = list(found.running.values())
            for one in first:
                await until(lambda one=one: one.child.poll() is not None, DEADLINE_SECONDS, "it goes on")  # type: ignore[misc]
                said = "\n".join(one.said())
                assert LOST in said or GAVE_UP in said, said[-4000:]
                found.start(one.name)  # and again, by what it has noted beside the database
                again = found.running[one.name]
                await until(lambda again=again: again.child.poll() is not None, DEADLINE_SECONDS, "it starts")  # type: ignore[misc]
                assert (again.child.returncode, again.acknowledged()) == (1, set())
                assert any(NOTED in line for line in again.said()), again.said()[-20:]
            # Who stands by never gives up.
            assert any(LOST in line for one in first for line in one.said())
