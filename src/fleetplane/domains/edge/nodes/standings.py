"""Keeping the records of daemons true to what their streams show.

Among several servers, only the session that a daemon's presence names writes its record; that it has none is
written only while there is none. Both are asked inside the transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from fleetplane.domains.edge.kinds import EDGE_NODE, EdgeNode, NodeState, tenant_of, tenant_scope
from fleetplane.domains.edge.nodes.registry import found_node
from fleetplane.domains.edge.streams.live import DaemonPresences, DaemonSighting, LiveDaemon, status_after
from fleetplane.fleet.streams.status_writer import StatusWriter
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.store import Draft, Store

log = structlog.get_logger(__name__)

ACTOR = "edge/streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    tenant: str
    heard_at_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _SeenDaemon:
    """A daemon at the moment of writing."""

    node_id: str
    scope: str
    heard_at_ns: int | None
    sighting: DaemonSighting | None
    """None if it has no stream here."""
    session: int | None
    """Of that stream, among all servers."""


class Standings:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        presences: DaemonPresences,
        whereabouts: PresenceRegistry | None = None,
    ) -> None:
        self._where = whereabouts if whereabouts is not None and whereabouts.shared else None
        self._store = store
        self._clock = clock
        self._presences = presences
        self._writer: StatusWriter[_Note] = StatusWriter(clock, self._write, failed=_not_written)

    def __repr__(self) -> str:
        return f"<Standings {self._writer!r}>"

    @property
    def is_shared(self) -> bool:
        """Whether other servers depend on what is written here."""
        return self._where is not None

    def note(self, live: LiveDaemon) -> None:
        """Something about this daemon may be worth writing down."""
        self._writer.note(live.node_id, _Note(tenant=live.tenant, heard_at_ns=live.heard_ns))

    def compare(self, live: LiveDaemon, node: EdgeNode) -> None:
        """Note the daemon only if its record differs: most changed records were written by this object."""
        seen = live.sighting() if live.session.is_open else None
        if status_after(node.spec, node.status, seen, now_ns=self._clock.now_ns()) != node.status:
            self.note(live)

    async def start(self) -> None:
        """Mark every daemon as disconnected that has no stream, here or at another server."""
        for node in self._store.list(EDGE_NODE):
            if (
                node.status is not None
                and node.status.state not in (NodeState.DISCONNECTED, NodeState.REVOKED)
                and self._presences.get(node.name) is None
            ):
                self._writer.note(node.name, _Note(tenant=tenant_of(node.scope), heard_at_ns=None))
        await self._writer.flush()

    async def run(self) -> None:
        """Until cancelled."""
        await self._writer.run()

    async def _write(self, batch: Sequence[tuple[str, _Note]]) -> None:
        found: list[_SeenDaemon] = []
        for node_id, note in batch:
            live = self._presences.get(node_id)
            found.append(
                _SeenDaemon(
                    node_id=node_id,
                    scope=tenant_scope(note.tenant),
                    heard_at_ns=note.heard_at_ns,
                    sighting=live.sighting() if live is not None else None,
                    session=live.place if live is not None else None,
                )
            )
        await self._transact(found)

    async def ended_elsewhere(self, node_id: str) -> None:
        """The server that had a daemon's session is gone."""
        node = found_node(self._store, node_id)
        if node is not None:
            seen = _SeenDaemon(
                node_id=node_id, scope=node.scope, heard_at_ns=None, sighting=None, session=None
            )
            await self._transact([seen])

    async def _transact(self, found: Sequence[_SeenDaemon]) -> None:
        where = self._where

        def change(draft: Draft) -> None:
            for seen in found:
                if where is not None and where.named(draft, seen.node_id) != seen.session:
                    continue  # another server has the daemon, and writes what is so
                node = draft.get(EDGE_NODE, seen.scope, seen.node_id)
                if node is None:
                    continue
                status = status_after(
                    node.spec,
                    node.status,
                    seen.sighting,
                    heard_at_ns=seen.heard_at_ns,
                    now_ns=draft.now_ns,
                )
                draft.put(
                    EDGE_NODE,
                    seen.scope,
                    seen.node_id,
                    spec=node.spec,
                    status=status,
                    conditions=node.conditions,
                )

        touches = [EDGE_NODE.key(seen.scope, seen.node_id) for seen in found]
        await self._store.transact(change, actor=ACTOR, action="edge.state", touches=touches)


def _not_written(nodes: int, error: FleetplaneError) -> None:
    log.warning("edge.standings_not_written", nodes=nodes, error=error.message)
