"""Servers that share a PostgreSQL, as processes of their own, and what they must leave behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support.shared import standby_server
from support.shared.standby_server import KEY
from support.shared.storekit import THING

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.store.engines.postgres import PostgresEngine
from fleetplane.kernel.store.engines.postgres_line import connect

DEADLINE_SECONDS = 60.0
OTHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND backend_type = 'client backend'"
)


class Process:
    """A server of its own, and what it said."""

    def __init__(self, url: str, folder: Path, name: str, *, writes: str = "active") -> None:
        self.name = name
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as told:
            self.child = subprocess.Popen(
                [sys.executable, standby_server.__file__, url, folder, name, writes],
                stdout=told,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def said(self) -> list[str]:
        text = self.log.read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    @property
    def is_active(self) -> bool:
        return self.child.poll() is None and any(line.startswith("active") for line in self.said())

    def acknowledged(self) -> set[str]:
        return {line for line in self.said() if line.startswith(f"{self.name}-")}

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


async def until(holds: Callable[[], object], seconds: float, what: str) -> float:
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, what
        await asyncio.sleep(0.05)
    return time.monotonic() - begun


async def _alone(url: str) -> None:
    """Return when PostgreSQL has finished what those that were killed had sent."""
    connection = await connect(url, {})
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await connection.fetchval(OTHERS):
                await asyncio.sleep(0.01)
    finally:
        await connection.close()


async def check(url: str, acknowledged: set[str]) -> None:
    """Nothing acknowledged is lost, numbers have no gaps, and the audit chain is whole."""
    await _alone(url)
    engine = await PostgresEngine.open(url)
    try:
        async with engine.load([THING.name]) as contents:
            names = {row.name async for page in contents.resources for row in page}
        assert acknowledged <= names
        number = terms = 0
        while (page := await engine.groups(after=number, limit=500)).groups:
            for group in page.groups:
                assert group.mark.number == number + 1
                number, term = group.mark.number, group.author.term
                assert term == 0 or term >= terms, "of one who has the seat no more"
                terms = max(terms, term)
        rows = [row async for page in engine.audit() for row in page]
        head = audit.Head(revision=page.head.revision, seq=page.head.audit_seq, hash=page.head.audit_hash)
        assert audit.verify(rows, head, KEY).intact
    finally:
        await engine.close()
