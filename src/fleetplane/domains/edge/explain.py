"""Why a daemon is not connected or healthy, and why a worker is not.

Edge has no reconciler: what is in the way follows from the record, and from what the open stream
was told and said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    NODE_CLAIM,
    WORKER,
    Desired,
    EdgeNode,
    PayloadDialect,
    WorkerState,
    daemon_scope,
    tenant_of,
    worker_scope,
)
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers, MergedConfig
from fleetplane.domains.edge.streams.live import DaemonPresences, LiveDaemon, sighting_of
from fleetplane.domains.edge.workers.registry import EdgeWorkers
from fleetplane.fleet.explain import from_record, placed
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled


class DaemonExplainer:
    def __init__(
        self,
        store: Store,
        presences: DaemonPresences,
        layers: ConfigLayers,
        clock: Clock,
        *,
        whereabouts: PresenceRegistry | None = None,
    ) -> None:
        """`whereabouts` are those of daemons on other servers, where there are any."""
        self._where = whereabouts if whereabouts is not None and whereabouts.shared else None
        self._store = store
        self._presences = presences
        self._layers = layers
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        node = self._find(name, within)
        return placed("daemon", name, None if node is None else daemon_scope(node.scope, node.name), within)

    def _find(self, name: str, within: str) -> EdgeNode | None:
        """By its id, also if it was revoked, which ends its claim to the id."""
        tenant = "/".join(within.split("/")[:2])
        if tenant:
            return self._store.get(EDGE_NODE, tenant, name.lower())
        claimed = self._store.claimed_by(EDGE_NODE, "", NODE_CLAIM, name.lower())
        if claimed is not None:
            return self._store.get(EDGE_NODE, claimed, name.lower())
        return next((node for node in self._store.list(EDGE_NODE) if node.name == name.lower()), None)

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        node = self._find(name, scope)
        if node is None:
            return ()
        live = self._presences.get(node.name)
        if live is not None and tenant_of(node.scope) != live.tenant:
            live = None
        return from_record(self._clock, node.name, tuple(self._reasons(node, live)), by="edge/streams")

    def _reasons(self, node: EdgeNode, live: LiveDaemon | None) -> Iterator[Reason]:
        spec, now_ns = node.spec, self._clock.now_ns()
        if spec.revoked_at_ns is not None:
            yield Reason(code="REVOKED", message=f"operators revoked it at {spelled(spec.revoked_at_ns)}")
            return
        if live is None and self._where is not None and self._where.is_anywhere(node.name):
            yield from self._elsewhere(node, self._where.server_of(node.name))
        elif live is None:
            yield from self._absence(node, now_ns)
        else:
            yield from self._stream(live, now_ns)
            yield from self._configuration(node, live)
        if spec.desired is not Desired.ACTIVE:
            told = live is not None and (live.draining or live.shutdown_by_ns is not None)
            words = "has been told so" if told else "has not been told yet"
            yield Reason(
                code=spec.desired.value.upper(), message=f"operators want it {spec.desired.value}; it {words}"
            )

    def _absence(self, node: EdgeNode, now_ns: int) -> Iterator[Reason]:
        status, spec = node.status, node.spec
        heard = None if status is None else status.last_heartbeat_at_ns
        if heard is None:
            yield Reason(code="NEVER_CONNECTED", message="it enrolled and has opened no stream since")
        else:
            yield Reason(
                code="NOT_CONNECTED", message=f"it has no stream; it was last heard at {spelled(heard)}"
            )
        if spec.token_expires_at_ns <= now_ns:
            yield Reason(
                code="TOKEN_EXPIRED",
                message=f"its token ended at {spelled(spec.token_expires_at_ns)}; it has to enrol again",
            )

    def _stream(self, live: LiveDaemon, now_ns: int) -> Iterator[Reason]:
        if live.silent:
            seconds = (now_ns - live.heard_ns) // 1_000_000_000
            yield Reason(
                code="SILENT", message=f"its stream is open, and it has said nothing on it for {seconds} s"
            )
        if live.credentials_until_ns is not None:
            yield Reason(
                code="ROTATED",
                message=f"its credentials were replaced; this stream ends at "
                f"{spelled(live.credentials_until_ns)}",
            )

    def _elsewhere(self, node: EdgeNode, server: str) -> Iterator[Reason]:
        """What the server that has its stream wrote down; what was sent on it is known there alone."""
        if node.status is None:
            return
        seen = sighting_of(node.status)
        if seen.silent:
            message = f"its stream to server {server} is open, and it has said nothing on it for too long"
            yield Reason(code="SILENT", message=message)
        wanted = self._layers.merged(tenant_of(node.scope), node.name)
        yield from self._held_back(node, wanted)
        if seen.config_refused:
            refused = seen.config_refused_version
            message = f"it refused configuration {refused}: {seen.config_refused}"
            yield Reason(code="CONFIG_REFUSED", message=message)
        elif wanted is None or wanted.version == seen.config_version:
            return
        elif seen.dialect is not PayloadDialect.LEGACY:  # which never says
            message = f"it has not said that configuration {wanted.version} is in force"
            yield Reason(code="CONFIG_UNCONFIRMED", message=message)

    def _held_back(self, node: EdgeNode, wanted: MergedConfig | None) -> Iterator[Reason]:
        newest = self._layers.at_version(tenant_of(node.scope), node.name, "")
        if wanted is not None and newest != wanted:
            message = f"a rollout holds it at configuration {wanted.version}, which is not the newest"
            yield Reason(code="CONFIG_HELD", message=message)

    def _configuration(self, node: EdgeNode, live: LiveDaemon) -> Iterator[Reason]:
        wanted = self._layers.merged(tenant_of(node.scope), node.name)
        yield from self._held_back(node, wanted)
        if live.config_refused:
            yield Reason(
                code="CONFIG_REFUSED",
                message=f"it refused configuration {live.config_pushed}: {live.config_refused}",
            )
        elif wanted is None or wanted.version == live.config_version:
            return
        elif wanted.version != live.config_pushed:
            yield Reason(code="CONFIG_NOT_SENT", message=f"configuration {wanted.version} waits to be sent")
        elif live.dialect is not PayloadDialect.LEGACY:  # which never says
            yield Reason(
                code="CONFIG_UNCONFIRMED",
                message=f"it was sent configuration {wanted.version} and has not said that it is in force",
            )


class WorkerExplainer:
    def __init__(self, store: Store, workers: EdgeWorkers, clock: Clock) -> None:
        self._store = store
        self._workers = workers
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        found = self._store.get(WORKER, "", name)
        return placed("worker", name, None if found is None else worker_scope(name), within)

    def explain(self, _scope: str, name: str) -> Sequence[Finding]:
        return from_record(self._clock, name, tuple(self._reasons(name)), by="edge/workers")

    def _reasons(self, name: str) -> Iterator[Reason]:
        worker = self._store.get(WORKER, "", name)
        if worker is None:
            return
        if worker.spec.registered_at_ns is None:
            yield Reason(code="NOT_REGISTERED", message="it was let in and is not registered now")
        elif self._workers.state(worker) is WorkerState.UNHEALTHY:
            yield Reason(code="UNHEALTHY", message="it has sent no heartbeat in time, or says so itself")
        if worker.spec.draining:
            yield Reason(code="DRAINING", message="operators want it to take no new work")
