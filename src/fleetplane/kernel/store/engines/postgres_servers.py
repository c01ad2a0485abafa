"""Which servers share a PostgreSQL database, as it has last heard of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import asyncpg
import structlog

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.store.engines.postgres_line import connect, translated
from fleetplane.kernel.store.engines.postgres_schema import stored_level
from fleetplane.kernel.store.notifiers.notifier import NO_BUS, BusKind, BusState
from fleetplane.kernel.store.servers.engine import ServerReport
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS
from fleetplane.kernel.store.servers.level import FIRST

log = structlog.get_logger(__name__)

_LIST = """
SELECT s.id, s.boot, s.version, s.number, s.agents, s.controllers, s.bus, s.bus_connected, s.highest_level,
 t.term, h.number AS head,
 CASE WHEN s.renewed_at > 'epoch' THEN extract(epoch FROM clock_timestamp() - s.renewed_at)::float8 END
  AS silent,
 coalesce(t.server = s.id AND t.boot = s.boot, false) AS leads,
 CASE WHEN s.number >= h.number THEN 0
  ELSE greatest(0, extract(epoch FROM s.renewed_at) - n.at_ns / 1000000000.0)::float8 END AS lag
FROM servers s CROSS JOIN (SELECT number FROM groups ORDER BY number DESC LIMIT 1) h
 LEFT JOIN (SELECT * FROM seats ORDER BY term DESC LIMIT 1) t ON true
 LEFT JOIN groups n ON n.number = s.number + 1 ORDER BY s.id
"""
_TELL = """
UPDATE servers SET agents = $2, controllers = $3, bus = $4, bus_connected = $5
WHERE id = $1 AND (agents, controllers, bus, bus_connected) IS DISTINCT FROM ($2, $3, $4, $5)
"""
_SIZE = "SELECT pg_database_size(current_database())"
_SETTINGS = {"statement_timeout": "10000"}
"""In milliseconds."""
WATCHED_SECONDS = 1.0
"""Between two looks while somebody watches: as often as servers renew their seats."""
IDLE_SECONDS = 5.0
"""Between two looks while nobody does: how old the answer to a single question may be."""
SIZE_SECONDS = 30.0
"""Between two questions for the size of the database, for which PostgreSQL looks at every file of it."""


class ServerState(StrEnum):
    ACTIVE = "active"
    STANDBY = "standby"
    GONE = "gone"
    """It left, or has not renewed its seat for as long as others wait before they take over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenServer:
    name: str
    boot: int
    version: str
    state: ServerState
    term: int
    """Of the one that has the seat; 0 for others."""
    silent_seconds: float | None
    """Since the last renewal, by the database's clock; None after it left."""
    lag_groups: int
    """How far behind it was at its last renewal; a second's worth of groups is no cause for concern."""
    lag_seconds: float | None
    """How long the first group that it had not applied then had been there; None if that is no longer kept,
    or nobody can know because the server left."""
    agents: int = 0
    """Streams of agents that it held, as it said some seconds ago; 0 once it is gone."""
    controllers: int = 0
    """Controllers that it held, likewise."""
    bus: BusState = NO_BUS
    level: int = FIRST
    """Of the store: what may be written."""
    supported_level: int = FIRST
    """The highest that this server's program supports."""


def state(*, leads: bool, silent_seconds: float | None) -> ServerState:
    if silent_seconds is None or silent_seconds > LIFE_SECONDS:
        return ServerState.GONE
    return ServerState.ACTIVE if leads else ServerState.STANDBY


async def seen(url: str) -> Sequence[SeenServer]:
    """Every server that has ever used the database."""
    with translated():
        connection = await connect(url, _SETTINGS)
        try:
            return await _listed(connection)
        finally:
            await connection.close()


async def _listed(connection: Any) -> Sequence[SeenServer]:
    found: list[SeenServer] = []
    current = await stored_level(connection)
    for row in await connection.fetch(_LIST):
        now = state(leads=row["leads"], silent_seconds=row["silent"])
        is_active = now is ServerState.ACTIVE
        lag = None if row["silent"] is None else row["lag"]
        found.append(
            SeenServer(
                name=row["id"],
                boot=row["boot"],
                version=row["version"],
                state=now,
                term=row["term"] if is_active else 0,
                silent_seconds=row["silent"],
                lag_groups=0 if is_active else max(0, row["head"] - row["number"]),
                lag_seconds=0.0 if is_active else lag,
                level=current,
                supported_level=row["highest_level"],
                **_said(row, now),
            )
        )
    return found


def _said(row: Any, now: ServerState) -> dict[str, Any]:
    """What a server said of itself; of one that is gone nothing is true any more."""
    if now is ServerState.GONE:
        return {}
    bus = BusState(kind=BusKind(row["bus"]), connected=row["bus_connected"])
    return {"agents": row["agents"], "controllers": row["controllers"], "bus": bus}


class ServerRoster:
    """The servers of a database as they were a moment ago, asked for once for everybody who wants to know.

    At each look this server says of itself what others see: its agents, its controllers and its bus.

    Its own connection: neither a slow answer nor a broken one holds up a write.
    """

    def __init__(self, url: str, clock: Clock, name: str) -> None:
        self._url = url
        self._name = name
        self._clock = clock
        self._connection: Any = None
        self._sized = -SIZE_SECONDS
        self._failed = False
        self.servers: Sequence[SeenServer] = ()
        self.size_bytes: int | None = None
        """Of the database; None before it was asked."""
        self.read_at = -IDLE_SECONDS
        """When the servers were read last, by the monotonic clock."""

    def __repr__(self) -> str:
        return f"<ServerRoster servers={len(self.servers)}>"

    @property
    def age_seconds(self) -> float:
        """How old the answer is."""
        return self._clock.monotonic() - self.read_at

    async def run(self, is_watched: Callable[[], bool], report: Callable[[], ServerReport]) -> NoReturn:
        """Look again and again, until cancelled; what cannot be read stays as it was, and grows old."""
        try:
            while True:
                await self._look(report())
                for _ in range(round(IDLE_SECONDS / WATCHED_SECONDS)):
                    await self._clock.sleep(WATCHED_SECONDS)
                    if is_watched():
                        break
        finally:
            self._drop()

    async def _look(self, report: ServerReport) -> None:
        try:
            with translated():
                if self._connection is None or self._connection.is_closed():
                    self._connection = await connect(self._url, _SETTINGS)
                bus = report.bus
                await self._connection.execute(
                    _TELL, self._name, report.agents, report.controllers, bus.kind.value, bus.connected
                )
                asked = self._clock.monotonic()
                self.servers = await _listed(self._connection)
                self.read_at, self._failed = asked, False
                if asked - self._sized >= SIZE_SECONDS:
                    self.size_bytes = await self._connection.fetchval(_SIZE)
                    self._sized = asked
        except FleetplaneError as error:
            if not self._failed:
                log.warning("store.servers_not_read", error=error.message)
            self._failed = True
            self._drop()

    def _drop(self) -> None:
        """Close the socket without a word: whoever is cancelled has no time for one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError, asyncpg.InterfaceError):
                connection.terminate()
