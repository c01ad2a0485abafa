"""Calls of daemons beside their stream: releases and metrics of the machine.

Both show the token of an enrolled node, which `DaemonRegister` verifies. The stream's heartbeat carries
nothing but that the daemon lives, and its message is not ours to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fleetplane.domains.edge.identity.assembly import CALL_RATE, JOIN_RATE, LISTENER
from fleetplane.domains.edge.identity.tokens import EDGE_ROLE, NodeTokens
from fleetplane.domains.edge.kinds import EDGE_NODE, NODE_CLAIM, EdgeNode, tenant_scope
from fleetplane.domains.edge.nodes.registry import shown_name
from fleetplane.fleet.figures import CPU, DISK, LOAD, MEMORY, FigureKeeper, Measure
from fleetplane.fleet.figures_service import SERVICE
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, Needs, service_rows

BEARER = b"bearer "


class DaemonRegister:
    def __init__(self, store: Store, tokens: NodeTokens) -> None:
        self._store = store
        self._tokens = tokens

    def recognise(self, context: CallContext, name: str) -> str:  # noqa: ARG002  # the token says it
        return self.node(context).name

    def node(self, context: CallContext) -> EdgeNode:
        """The enrolled node whose token the call shows; raises `Unauthenticated`."""
        shown = context.field(b"authorization") or b""
        if shown[: len(BEARER)].lower() != BEARER:
            raise Unauthenticated("the token of an enrolled node is required")
        claims = self._tokens.verify_node(shown[len(BEARER) :].strip().decode("ascii", "replace"))
        node = self._find(claims.node_id)
        if claims.role != EDGE_ROLE or node is None or node.scope != tenant_scope(claims.tenant):
            raise Unauthenticated("the token is not of a daemon that is enrolled", hint="enrol it again")
        return node

    def card(self, agent: str) -> AgentCard | None:
        """A daemon by its node id; None once it is revoked."""
        node = self._find(agent)
        if node is None:
            return None
        labels = node.status.capabilities.labels if node.status is not None else {}
        return AgentCard(title=shown_name(node), labels={**dict.fromkeys(node.spec.tags, "true"), **labels})

    def _find(self, node_id: str) -> EdgeNode | None:
        scope = self._store.claimed_by(EDGE_NODE, "", NODE_CLAIM, node_id)
        return self._store.get(EDGE_NODE, scope, node_id) if scope is not None else None


def _register(domain: Any, store: Store) -> DaemonRegister:
    return DaemonRegister(store, domain.identity.tokens)


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    # As with every call of daemons, the proof is in the request.
    authentication=Authentication.ANONYMOUS,
    permission=None,
    rate=JOIN_RATE,
    needs=Needs.WRITES,
    register=_register,
)


PREFIX: Final = "edge"
MEASURES: Final = (
    CPU,
    MEMORY,
    DISK,
    LOAD,
    Measure(name="runningCommands", title="Commands that run", unit="", most=1e6),
    Measure(name="waitingResults", title="Results that wait to be told", unit="", most=1e9),
)
# As with every call of daemons, the proof is in the request.
ROWS: Final = tuple(
    service_rows(
        SERVICE,
        None,
        listener=LISTENER,
        authentication=Authentication.ANONYMOUS,
        rate=CALL_RATE,
        needs=Needs.WRITES,
    )
)


class DaemonFigures:
    """Takes figures of the node whose token a call shows, and of no other."""

    def __init__(self, register: DaemonRegister, figures: FigureKeeper) -> None:
        self._register = register
        self._figures = figures

    def __repr__(self) -> str:
        return f"<DaemonFigures {self._figures!r}>"

    def take(self, context: CallContext, name: str, objects: Mapping[str, Mapping[str, float]]) -> None:  # noqa: ARG002  # the token says it
        """Daemons look after nothing but their own machine."""
        node = self._register.node(context)
        self._figures.take(node.scope, node.name, objects.get("", {}))
