"""In which state a daemon is, from what is known about it. Pure.

    REVOKED        operators took its place away; holds whatever else is so
    DISCONNECTED   it has no stream
    DRAINING       it has one, and was told to take no new work
    UNHEALTHY      it has one, and has said nothing on it for too long
    CONNECTED      otherwise

A daemon that drains may stop its heartbeats, so silence does not make it unhealthy.
"""

from __future__ import annotations

import msgspec

from fleetplane.domains.edge.kinds import (
    Capabilities,
    Desired,
    NodeSpec,
    NodeState,
    NodeStatus,
    PayloadDialect,
)

_SEEN = (
    "stream_id",
    "dialect",
    "capabilities",
    "config_version",
    "config_refused",
    "config_refused_version",
    "config_refused_at_ns",
    "hello_ms",
)


class DaemonSighting(msgspec.Struct, frozen=True, kw_only=True):
    """What the open stream of a daemon says about it."""

    stream_id: str
    dialect: PayloadDialect
    capabilities: Capabilities
    last_heartbeat_at_ns: int
    config_version: str
    config_refused: str = ""
    config_refused_version: str = ""
    config_refused_at_ns: int = 0
    hello_ms: int = 0
    silent: bool = False
    """Nothing was heard of it for longer than its heartbeats allow."""


def sighting_of(status: NodeStatus) -> DaemonSighting:
    """What the server that has a daemon's stream wrote down of it."""
    return DaemonSighting(
        **{name: getattr(status, name) for name in _SEEN},
        last_heartbeat_at_ns=status.last_heartbeat_at_ns or status.since_ns,
        silent=status.state is NodeState.UNHEALTHY,
    )


def state_of(spec: NodeSpec, seen: DaemonSighting | None) -> NodeState:
    if spec.revoked_at_ns is not None:
        return NodeState.REVOKED
    if seen is None:
        return NodeState.DISCONNECTED
    if spec.desired is not Desired.ACTIVE:
        return NodeState.DRAINING
    return NodeState.UNHEALTHY if seen.silent else NodeState.CONNECTED


def status_after(
    spec: NodeSpec,
    before: NodeStatus | None,
    seen: DaemonSighting | None,
    *,
    heard_at_ns: int | None = None,
    now_ns: int,
) -> NodeStatus:
    """The status worth writing down; equal to the one before unless something of note changed.

    Heartbeats alone are not of note: the moment of the last one (`heard_at_ns`, for a stream that
    has ended) is written when something else is.
    """
    state = state_of(spec, seen)
    if before is None:
        before = NodeStatus(state=state, since_ns=now_ns)
    changed: dict[str, object] = {}
    if state is not before.state:
        changed |= {"state": state, "since_ns": now_ns}
    if seen is not None:
        heard_at_ns = seen.last_heartbeat_at_ns
        for name in _SEEN:
            if getattr(seen, name) != getattr(before, name):
                changed[name] = getattr(seen, name)
    if not changed:
        return before
    if heard_at_ns is not None:
        changed["last_heartbeat_at_ns"] = heard_at_ns
    return msgspec.structs.replace(before, **changed)
