"""Who is connected and how they are, in memory: heartbeats are not written down.

Holds the facts from which an agent's state follows, and the rule by which it does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fleetplane.domains.proxies.deployment import Serving
from fleetplane.domains.proxies.ports import Sighting
from fleetplane.domains.proxies.values import AgentHealth, AgentState, DeploymentState
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.sessions import Session, Sessions

STREAM = "stream"
TIMED_OUT = "connection_timeout"
CLOSED = "stream_closed"
DELETED = "deleted"
EVENTS_REMEMBERED = 256
"""Per agent: an event that is sent again because its receipt was lost is recognised."""


@dataclass(slots=True, kw_only=True)
class Live:
    """What is known of one agent since it came."""

    session: Session[pb.MasterMessage]
    since_ns: int
    last_seen_ns: int
    health: AgentHealth | None = None
    serving: Serving | None = None
    settled: tuple[int, str] | None = None
    """The version and checksum with which it was last found to serve what it should."""
    nginx_down: bool = False
    behind_since_ns: int | None = None
    """Since when it serves something else than it should."""
    ended_at_ns: int | None = None
    """When its session ended; it may come back for a while before it counts as gone."""
    ended_because: str = ""
    events: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def is_settled_at(self, version: int) -> bool:
        """Whether what it serves was looked into and found to be this version, all of it."""
        serving = self.serving
        return (
            serving is not None and serving.version == version and self.settled == (version, serving.checksum)
        )

    def is_new_event(self, identity: str) -> bool:
        if not identity:
            return True
        if identity in self.events:
            return False
        self.events[identity] = None
        if len(self.events) > EVENTS_REMEMBERED:
            self.events.popitem(last=False)
        return True


class Presences:
    """All agents that are connected, or were a moment ago."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._live: dict[str, Live] = {}

    def __repr__(self) -> str:
        return f"<Presences {len(self._live)}>"

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._live))

    def __len__(self) -> int:
        return sum(live.session.is_open for live in self._live.values())

    def get(self, agent_id: str) -> Live | None:
        return self._live.get(agent_id)

    def open(self, agent_id: str) -> Live | None:
        """Only if its session is open."""
        live = self._live.get(agent_id)
        return live if live is not None and live.session.is_open else None

    def came(self, agent_id: str, session: Session[pb.MasterMessage], *, now_ns: int) -> Live:
        before = self._live.get(agent_id)
        live = Live(session=session, since_ns=now_ns, last_seen_ns=now_ns)
        if before is not None:  # what it said a moment ago still holds
            live.health, live.nginx_down, live.events = before.health, before.nginx_down, before.events
        self._live[agent_id] = live
        return live

    def forget(self, agent_id: str) -> None:
        self._live.pop(agent_id, None)

    # What REST asks.

    def sighting(self, agent_id: str) -> Sighting | None:
        live = self.open(agent_id)
        return Sighting(last_seen_at_ns=live.last_seen_ns, health=live.health) if live is not None else None

    def disconnect(self, agent_id: str, *, reason: str) -> None:
        session = self._sessions.get(agent_id, STREAM)
        if session is not None:
            session.close(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    state: AgentState
    reasons: tuple[str, ...]


def standing(
    live: Live,
    *,
    last_deployment: tuple[int, DeploymentState] | None,
    grave_alerts: Iterable[str],
    behind_limit_seconds: float,
    now_ns: int,
) -> Standing:
    """Of an agent that is connected. The reasons are worded so that they change only with their cause."""
    reasons = []
    if live.nginx_down:
        reasons.append("NGINX is not running")
    if last_deployment is not None:
        version, outcome = last_deployment
        if outcome is DeploymentState.FAILED:
            reasons.append(f"version {version} failed")
        elif outcome is DeploymentState.ROLLED_BACK:
            reasons.append(f"version {version} was rolled back")
    behind = live.behind_since_ns
    if behind is not None and now_ns - behind >= behind_limit_seconds * 1e9:
        reasons.append("its configuration is behind")
    reasons += [f"alert {identity}" for identity in sorted(grave_alerts)]
    state = AgentState.DEGRADED if reasons else AgentState.ONLINE
    return Standing(state=state, reasons=tuple(reasons))
