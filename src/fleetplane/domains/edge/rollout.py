"""Rollouts of configuration layers: the layers of everyone and of a tenant, to the tenant's daemons.

A version is named by the digest of both layers merged, which is what a daemon without a layer of its own
reports. A layer of one daemon is no part of a version: it is laid over whatever the daemon is held at, at
once. Daemons of the older dialect never acknowledge a configuration; they take no part, and get what is
rolled out when the rollout is done.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from fleetplane.domains.edge.kinds import (
    EDGE_NODE,
    EdgeNode,
    NodeState,
    PayloadDialect,
    check_tenant,
    tenant_of,
    tenant_scope,
)
from fleetplane.domains.edge.nodes.config_layers import (
    CONFIG_LAYER,
    GLOBAL,
    SUBJECT,
    TENANT,
    ConfigLayers,
    LayerAt,
    layers_of,
    shared,
)
from fleetplane.domains.edge.nodes.registry import shown_name
from fleetplane.domains.edge.streams.call_encoding import (
    SECURITY_CONTEXT,
    ToolCall,
    decode_outcome,
    encode_call,
)
from fleetplane.domains.edge.streams.controller import EdgeController, Pushes
from fleetplane.domains.edge.streams.live import DaemonPresences, DaemonSighting, LiveDaemon, sighting_of
from fleetplane.fleet.rollouts import holds
from fleetplane.fleet.rollouts.holds import HeldVersions
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import OPEN, Commands, CommandTarget, state_of
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.resources import AnyKind, Key
from fleetplane.kernel.store import Draft, HookedChange, Store
from fleetplane.kernel.values.times import NS

HEALTHY = "healthy"
PROBE_TOOL = "cmd.run"
AGAIN_AT_ONCE = 256
"""Daemons of other servers that are told in one transaction."""
PROBE_POLL_SECONDS = 0.2
"""Between looks at whether a probe has ended everywhere."""


class LayerConfiguration:
    """The subject `edge.config`."""

    name = SUBJECT
    domain = "edge"
    summary = "configuration layers of a tenant's daemons; confirmed by the daemon's acknowledgement"
    measures: Mapping[str, str] = {HEALTHY: "share of daemons that are connected and heard, from 0 to 1"}
    watches: Sequence[AnyKind] = (EDGE_NODE,)
    versions: Sequence[AnyKind] = (CONFIG_LAYER,)

    def __init__(
        self,
        store: Store,
        layers: ConfigLayers,
        *,
        presences: DaemonPresences,
        pushes: Pushes,
        controller: EdgeController,
        ledger: Commands,
        clock: Clock,
        whereabouts: PresenceRegistry | None = None,
    ) -> None:
        """`whereabouts` are those of daemons on other servers, where there are any."""
        self._store = store
        self._layers = layers
        self._presences = presences
        self._where = whereabouts if whereabouts is not None and whereabouts.shared else None
        self._pushes = pushes
        self._controller = controller
        self._ledger = ledger
        self._clock = clock
        self._held = HeldVersions(store, SUBJECT, _content)

    def __repr__(self) -> str:
        return f"<LayerConfiguration {self._held!r}>"

    # Holding.

    def commit_hook(self, _actor: str, _action: str, touches: Collection[Key]) -> HookedChange | None:
        """Part of every change of a layer of everyone or of a tenant: holds daemons where they are."""
        layers = [key for key in touches if key.kind == CONFIG_LAYER.name and key.name in (GLOBAL, TENANT)]
        if not layers:
            return None
        scopes = {key.scope for key in layers if key.scope}
        if any(not key.scope for key in layers):
            scopes |= set(self.scopes(""))
        keys = frozenset[Key]().union(*(holds.keys_of(SUBJECT, scope) for scope in scopes))
        return HookedChange(change=lambda draft, _made: self._hold(draft, sorted(scopes)), touches=keys)

    def _hold(self, draft: Draft, scopes: Sequence[str]) -> None:
        before = _earlier(draft)
        for scope in scopes:
            earlier, later = shared(before, tenant_of(scope)), _content(draft, scope)
            if earlier != later:
                holds.changing(draft, SUBJECT, scope, before=earlier, after=later)

    # Names.

    def scope(self, text: str) -> str:
        """A tenant by its name or its scope."""
        tenant = check_tenant(tenant_of(text), field="scope")
        if not self._store.list(EDGE_NODE, tenant_scope(tenant)):
            raise NotFound(f"tenant {tenant!r} has no daemons", hint="write tenant/NAME")
        return tenant_scope(tenant)

    def scopes(self, below: str) -> Sequence[str]:
        return sorted({node.scope for node in self._store.list(EDGE_NODE, below)})

    def holder(self, kind: str, scope: str, name: str) -> str | None:
        """The tenant of a layer of the resource API; a layer of one daemon goes to it at once."""
        if kind != "edge-config" or name not in (GLOBAL, TENANT):
            return None
        return "" if name == GLOBAL else tenant_scope(scope.rpartition("/")[2])

    def version(self, scope: str, text: str) -> str:
        return self._held.version(scope, text)

    def newest(self, scope: str) -> str:
        return self._held.newest(scope)

    def waiting(self, scope: str) -> str:
        return self._held.waiting(scope)

    def default(self, scope: str) -> str:
        return self._held.default(scope)

    # Targets.

    def targets(self, scope: str) -> Mapping[str, TargetFact]:
        """The tenant's daemons that acknowledge what they are sent, in the order of their names."""
        nodes = [
            node
            for node in self._store.list(EDGE_NODE, scope)
            if node.scope == scope and node.spec.revoked_at_ns is None and not self._is_legacy(node)
        ]
        nodes.sort(key=lambda node: (shown_name(node), node.name))
        known = self._held.known(scope)
        return {node.name: self._fact(node, known) for node in nodes}

    def _is_legacy(self, node: EdgeNode) -> bool:
        dialect = self._presences.dialect(node.name)
        if dialect is None:
            dialect = node.status.dialect if node.status is not None else PayloadDialect.DOCUMENTED
        return dialect is PayloadDialect.LEGACY

    def _live(self, node: EdgeNode) -> LiveDaemon | None:
        live = self._presences.get(node.name)
        return live if live is not None and live.tenant == tenant_of(node.scope) else None

    def _fact(self, node: EdgeNode, known: Sequence[str]) -> TargetFact:
        seen = self._seen(node)
        status = node.status
        has = seen.config_version if seen is not None else status.config_version if status is not None else ""
        fact = TargetFact(
            version=self._named(node, has, known),
            online=seen is not None,
            healthy=seen is not None and not seen.silent,
            labels=_labels(node),
            title=shown_name(node),
        )
        if seen is None or not seen.config_refused:
            return fact
        return TargetFact(
            version=fact.version,
            online=fact.online,
            healthy=fact.healthy,
            labels=fact.labels,
            title=fact.title,
            error=f"it refused the configuration: {seen.config_refused}",
            error_at_ns=seen.config_refused_at_ns,
            error_version=self._named(node, seen.config_refused_version, known),
        )

    def _seen(self, node: EdgeNode) -> DaemonSighting | None:
        """What a daemon's stream says of it: the stream itself if it is here, else what its server wrote."""
        live = self._live(node)
        if live is not None:
            return live.sighting()
        if node.status is None or self._where is None or not self._where.is_anywhere(node.name):
            return None
        return sighting_of(node.status)

    def _named(self, node: EdgeNode, reported: str, known: Sequence[str]) -> str:
        """The version whose layers, with the daemon's own laid over, have the digest that it reports.

        If several have, it is the one that the daemon is to have, then the newest.
        """
        wanted = self._layers.holds.wanted(node.scope, node.name)
        for version in (wanted, *known) if wanted else known:
            merged = self._layers.at_version(tenant_of(node.scope), node.name, version)
            if merged is not None and merged.version == reported:
                return version
        return ""

    # Moving.

    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        assert rollout
        await self._held.steer(scope, versions, default=default)

    async def again(self, scope: str, targets: Collection[str]) -> None:
        elsewhere = []
        for name in targets:
            live = self._presences.get(name)
            if live is not None and tenant_scope(live.tenant) == scope:
                self._pushes.configure_again(live)
                self._controller.look(live)
            elif self._where is not None:
                elsewhere.append(name)
        for start in range(0, len(elsewhere), AGAIN_AT_ONCE):
            await self._again_elsewhere(scope, elsewhere[start : start + AGAIN_AT_ONCE])

    async def _again_elsewhere(self, scope: str, names: Sequence[str]) -> None:
        """Whichever server has these daemons sees it in their records."""

        def change(draft: Draft) -> None:
            for name in names:
                node = draft.get(EDGE_NODE, scope, name)
                if node is not None and node.spec.revoked_at_ns is None:
                    spec = msgspec.structs.replace(node.spec, config_again_at_ns=draft.now_ns)
                    draft.put(
                        EDGE_NODE, scope, name, spec=spec, status=node.status, conditions=node.conditions
                    )

        keys = [EDGE_NODE.key(scope, name) for name in names]
        await self._store.transact(change, actor=ACTOR, action="edge.config_again", touches=keys)

    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:
        assert rollout
        await self._held.settle(scope, version, held=held)

    # Gates.

    async def measure(
        self, scope: str, _query: str, targets: Collection[str], _period: Period
    ) -> float | None:
        if not targets:
            return None
        nodes = (self._store.get(EDGE_NODE, scope, name) for name in targets)
        good = sum(node is not None and _is_healthy(node) for node in nodes)
        return good / len(targets)

    async def probe(
        self, scope: str, targets: Collection[str], command: Sequence[str], *, seconds: float
    ) -> Mapping[str, int | None]:
        """Run a program on daemons by `cmd.run`, as their owners allow; the exit code of each."""
        call = ToolCall(
            tool=PROBE_TOOL,
            args_json=msgspec.json.encode({"command": command[0], "args": list(command[1:])}),
            security_context=SECURITY_CONTEXT,
            tenant=tenant_of(scope),
            actor=ACTOR,
            deadline_seconds=seconds,
        )
        issued = await self._ledger.issue(
            scope,
            PROBE_TOOL,
            list(targets),
            actor=ACTOR,
            payload=encode_call(call),
            repeatable=False,
            deliver_within_seconds=seconds,
            run_for_seconds=seconds,
        )
        end_ns = self._clock.now_ns() + round((seconds + PROBE_POLL_SECONDS) * NS)
        while any(state_of(one) in OPEN for one in self._ledger.targets(issued)):
            if self._clock.now_ns() >= end_ns:
                break
            await self._clock.sleep(PROBE_POLL_SECONDS)
        return {one.spec.target: _exit_code(one) for one in self._ledger.targets(issued)}


def _exit_code(target: CommandTarget) -> int | None:
    """Of a program that ran to its end; whatever else became of it is no exit code."""
    if target.status is None or state_of(target) in OPEN:
        return None
    return decode_outcome(target.status.result).exit_code


def _content(source: Store | Draft, scope: str) -> bytes:
    return shared(layers_of(source), tenant_of(scope))


def _earlier(draft: Draft) -> LayerAt:
    """The layers as they were before a draft changed them."""
    changed = {(before or after).key: before for before, after in draft.differences() if before or after}  # type: ignore[union-attr]
    current = layers_of(draft)
    return lambda place: changed[place.key] if place.key in changed else current(place)


def _is_healthy(node: EdgeNode) -> bool:
    return node.status is not None and node.status.state in (NodeState.CONNECTED, NodeState.DRAINING)


def _labels(node: EdgeNode) -> Mapping[str, str]:
    """What a daemon says of itself; and the operators' tags, which win, each a label without a value."""
    said = node.status.capabilities.labels if node.status is not None else {}
    return {**said, **dict.fromkeys(node.spec.tags, "")}
