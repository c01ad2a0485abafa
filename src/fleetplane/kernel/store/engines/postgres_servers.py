"""Which servers share a PostgreSQL database, as it has last heard of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fleetplane.kernel.store.engines.postgres_line import connect, translated
from fleetplane.kernel.store.servers.seat import LIFE_SECONDS

_LIST = """
SELECT s.id, s.boot, s.version, s.number, h.term, h.number AS head,
 CASE WHEN s.renewed_at > 'epoch' THEN extract(epoch FROM clock_timestamp() - s.renewed_at)::float8 END
  AS silent,
 (h.server = s.id AND h.boot = s.boot) AS writes
FROM servers s, (SELECT * FROM groups ORDER BY number DESC LIMIT 1) h ORDER BY s.id
"""


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
    """Of the one that writes; 0 for others."""
    silent_seconds: float | None
    """Since the last renewal, by the database's clock; None after it left."""
    lag_groups: int
    """How far behind it was at its last renewal; a second's worth of groups is no cause for concern."""


def state(*, writes: bool, silent_seconds: float | None) -> ServerState:
    if silent_seconds is None or silent_seconds > LIFE_SECONDS:
        return ServerState.GONE
    return ServerState.ACTIVE if writes else ServerState.STANDBY


async def seen(url: str) -> Sequence[SeenServer]:
    """Every server that has ever used the database."""
    with translated():
        connection = await connect(url, {"statement_timeout": "10000"})
        try:
            rows = await connection.fetch(_LIST)
        finally:
            await connection.close()
    found: list[SeenServer] = []
    for row in rows:
        now = state(writes=row["writes"], silent_seconds=row["silent"])
        is_active = now is ServerState.ACTIVE
        found.append(
            SeenServer(
                name=row["id"],
                boot=row["boot"],
                version=row["version"],
                state=now,
                term=row["term"] if is_active else 0,
                silent_seconds=row["silent"],
                lag_groups=0 if is_active else max(0, row["head"] - row["number"]),
            )
        )
    return found
