"""Writing down in which state daemons are, many at a time.

Whoever sees a change notes whose it is. Soon after, all that were noted are looked at and written
in one transaction: a fleet that comes back at once costs dozens of transactions, not thousands.
What is written follows from what is so at that moment, so notes may repeat and come late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from fleetplane.domains.edge.kinds import EDGE_NODE, EdgeNode, NodeState, tenant_of, tenant_scope
from fleetplane.domains.edge.presence import Live, Presences
from fleetplane.domains.edge.states import Sighting, status_after
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

ACTOR = "edge/streams"
BATCH = 256
"""Records in one transaction, so that it never holds up other writers for long."""
GATHER_SECONDS = 0.05
"""How long the first of a batch waits for others."""
RETRY_SECONDS = 1.0
"""After the store refused: nothing is lost meanwhile, as what is so then is written then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    tenant: str
    heard_at_ns: int | None


class Standings:
    def __init__(self, store: Store, clock: Clock, presences: Presences) -> None:
        self._store = store
        self._clock = clock
        self._presences = presences
        self._noted: dict[str, _Note] = {}
        """By node; bounded by the number of daemons there are."""
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Standings noted={len(self._noted)}>"

    def note(self, live: Live) -> None:
        """Something about this daemon may be worth writing down."""
        self._noted[live.node_id] = _Note(tenant=live.tenant, heard_at_ns=live.last_heartbeat_ns)
        self._news.set()

    def compare(self, live: Live, node: EdgeNode) -> None:
        """The same, but only if its record says otherwise: most records that change are written here."""
        seen = live.sighting() if live.session.is_open else None
        if status_after(node.spec, node.status, seen, now_ns=self._clock.now_ns()) != node.status:
            self.note(live)

    async def start(self) -> None:
        """Nobody has a stream yet, whatever the records say."""
        for node in self._store.list(EDGE_NODE):
            if node.status is not None and node.status.state not in (
                NodeState.DISCONNECTED, NodeState.REVOKED,
            ):  # fmt: skip
                self._noted[node.name] = _Note(tenant=tenant_of(node.scope), heard_at_ns=None)
        while self._noted:
            await self._write(self._taken())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            await self._clock.sleep(GATHER_SECONDS)
            self._news.clear()
            while self._noted:
                batch = self._taken()
                try:
                    await self._write(batch)
                except FleetplaneError as error:
                    log.warning("edge.standings_not_written", nodes=len(batch), error=error.message)
                    self._noted = {**dict(batch), **self._noted}
                    await self._clock.sleep(RETRY_SECONDS)

    def _taken(self) -> Sequence[tuple[str, _Note]]:
        taken = [(node_id, self._noted[node_id]) for node_id in tuple(self._noted)[:BATCH]]
        for node_id, _ in taken:
            del self._noted[node_id]
        return taken

    async def _write(self, batch: Sequence[tuple[str, _Note]]) -> None:
        found: list[tuple[str, _Note, Sighting | None]] = []
        for node_id, note in batch:
            live = self._presences.get(node_id)
            found.append((node_id, note, live.sighting() if live is not None else None))

        def change(draft: Draft) -> None:
            for node_id, note, seen in found:
                scope = tenant_scope(note.tenant)
                node = draft.get(EDGE_NODE, scope, node_id)
                if node is None:
                    continue
                status = status_after(
                    node.spec, node.status, seen, heard_at_ns=note.heard_at_ns, now_ns=draft.now_ns
                )
                draft.put(
                    EDGE_NODE, scope, node_id, spec=node.spec, status=status, conditions=node.conditions
                )

        touches = [EDGE_NODE.key(tenant_scope(note.tenant), node_id) for node_id, note in batch]
        await self._store.transact(change, actor=ACTOR, action="edge.state", touches=touches)
