"""Who is connected and how they are, in memory: heartbeats are not written down.

Holds the facts from which an agent's state follows, and the rule by which it does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from msgspec import UNSET

from fleetplane.domains.proxies.agents.machines import Approach, Holder
from fleetplane.domains.proxies.agents.ports import AgentSighting
from fleetplane.domains.proxies.kinds.records import Agent, DeploymentStatus
from fleetplane.domains.proxies.kinds.values import AgentHealth, AgentState, DeploymentState, Hands, Observed
from fleetplane.domains.proxies.rules.alerts import Heights
from fleetplane.domains.proxies.rules.deployment import ServedVersion
from fleetplane.fleet.streams.presence import Flight, Live, Presences
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.sessions import Sessions
from fleetplane.kernel.values.times import NS

NS_PER_MINUTE = 60 * NS
LOOK_SECONDS = 5.0
"""As often as servers write down whom they heard."""
STREAM = "stream"
CHANNEL = "proxies"
"""Of commands and presences."""
TIMED_OUT = "connection_timeout"
CLOSED = "stream_closed"
DELETED = "deleted"
REASON_LIMIT = 512
"""Characters of one reason for an agent's state."""
EVENTS_PER_MINUTE = 60
"""Of an agent, kept and told; a machine on which NGINX dies every second says nothing new with more."""
EVENTS_REMEMBERED = 256
"""Per agent: an event that is sent again because its receipt was lost is recognised."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveAgent(Live[pb.MasterMessage, Flight]):
    """What is known of one agent since it came."""

    record: Agent
    """As it registered."""
    health: AgentHealth | None = None
    serving: ServedVersion | None = None
    observed: Observed | None = None
    """The NGINX that it was started beside, as of its last report."""
    settled: tuple[int, str] | None = None
    """The version and checksum with which it was last found to serve what it should."""
    measures: bool = False
    """Whether it sends measurements of its own; its reports stand for them otherwise."""
    nginx_down: bool = False
    behind_since_ns: int | None = None
    """Since when it serves something else than it should."""
    ended_at_ns: int | None = None
    """When its session ended; it may come back for a while before it counts as gone."""
    ended_because: str = ""
    peer: str = ""
    """The connection that it came on."""
    address: str = ""
    hostname: str = ""
    events: OrderedDict[str, None] = field(default_factory=OrderedDict)
    heights: Heights = field(default_factory=Heights)
    events_since_ns: int = 0
    """When the minute began in which `events_told` were taken."""
    events_told: int = 0
    events_dropped: int = 0
    stirred_ns: int = 0
    """When something last changed here that may let a failed version pass: it came, NGINX is back, an
    alert ended."""
    retry_asked: bool = False
    """Whether somebody wants what failed to be tried again now."""
    retry_heard_ns: int = 0
    """When somebody asked for that at another server, as far as it was heard here."""
    health_noted_ns: int = 0
    """When its health was last written down for other servers."""
    digest: str = ""
    """Of the token that it came with."""
    key: str = ""
    """Of the key that it has shown to hold; empty for one that has only the token."""

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

    def has_room_for_event(self, now_ns: int) -> bool:
        """Whether one more event is taken in this minute."""
        if now_ns - self.events_since_ns >= NS_PER_MINUTE:
            self.events_since_ns, self.events_told = now_ns, 0
        self.events_told += 1
        return self.events_told <= EVENTS_PER_MINUTE


class AgentPresences(Presences[LiveAgent]):
    """All agents that are connected to this server, or were a moment ago."""

    def __init__(
        self, sessions: Sessions, whereabouts: PresenceRegistry, heard: LastSeen, clock: Clock
    ) -> None:
        super().__init__(lingering=True)
        self._sessions = sessions
        self._whereabouts = whereabouts
        self._heard = heard
        self._clock = clock
        self._looked_ns = 0
        self._distant: Mapping[str, float] = {}
        """How many seconds before that moment agents of other servers were heard."""
        self.events_dropped = 0
        """Of all agents, those that were too many."""

    def serving(self, agent_id: str) -> ServedVersion | None:
        """What a connected agent reports that it serves."""
        live = self.get(agent_id)
        return live.serving if live is not None else None

    def came(self, live: LiveAgent) -> None:
        before = self.current(live.agent)
        super().came(live)
        if before is not None:  # what it said a moment ago still holds
            live.health, live.nginx_down, live.events = before.health, before.nginx_down, before.events
            live.heights = before.heights
            live.events_since_ns, live.events_told = before.events_since_ns, before.events_told

    def holder(self, agent: Agent, approach: Approach, *, now_ns: int) -> Holder | None:
        """Whose stream is open now.

        Of one at another server it is not known when it was last heard. It gives way to a machine that looks
        the same, as it would here once its connection is known to be broken, and to no other.
        """
        live = self.get(agent.name)
        if live is not None:
            return Holder(peer=live.peer, last_seen_ns=live.heard_ns)
        if not self._whereabouts.server_of(agent.name) or self._whereabouts.session_here(agent.name):
            return None
        machine = agent.status.machine if agent.status is not None else UNSET
        return None if machine == approach.identity else Holder(peer="", last_seen_ns=now_ns)

    def is_back(self, agent_id: str, approach: Approach) -> bool:
        """Whether it looks like the machine that was here a moment ago."""
        before = self.current(agent_id)
        return before is not None and (before.hostname, before.address) == (
            approach.hostname,
            approach.address,
        )

    # What REST asks.

    def is_present(self, agent_id: str) -> bool:
        """Whether it is connected, to whichever server."""
        return self.get(agent_id) is not None or (
            self._whereabouts.shared and self._whereabouts.is_anywhere(agent_id)
        )

    async def follow_heard(self) -> NoReturn:
        """Learn every few seconds when agents at other servers were last heard, until cancelled."""
        while True:
            with suppress(FleetplaneError):  # then what was known before is shown
                self._distant = await self._heard.read()
                self._looked_ns = self._clock.now_ns()
            await self._clock.sleep(LOOK_SECONDS)

    def sighting(self, agent_id: str) -> AgentSighting | None:
        live = self.get(agent_id)
        if live is not None:
            return AgentSighting(last_seen_at_ns=live.heard_ns, health=live.health)
        ago = self._distant.get(agent_id)
        if ago is None or not self.is_present(agent_id):
            return None
        return AgentSighting(last_seen_at_ns=self._looked_ns - round(ago * NS), health=None, here=False)

    def disconnect(self, agent_id: str, *, reason: str) -> None:
        session = self._sessions.get(agent_id, STREAM)
        if session is not None:
            session.close(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStanding:
    state: AgentState
    reasons: tuple[str, ...]


def standing(
    live: LiveAgent,
    *,
    last_deployment: tuple[int, DeploymentStatus] | None,
    grave_alerts: Mapping[str, str],
    behind_limit_seconds: float,
    now_ns: int,
) -> AgentStanding:
    """Of an agent that is connected. The reasons are worded so that they change only with their cause:
    an alert's message, for example, is written down when it opens or its severity changes."""
    reasons = []
    if live.nginx_down:
        reasons.append("NGINX is not running")
    if last_deployment is not None and not is_observing(live.observed):
        version, outcome = last_deployment
        if outcome.state is DeploymentState.FAILED:
            reasons.append(_because(f"version {version} failed", outcome.error))
        elif outcome.state is DeploymentState.ROLLED_BACK:
            reasons.append(_because(f"version {version} was rolled back", outcome.error))
    behind = live.behind_since_ns
    if behind is not None and now_ns - behind >= behind_limit_seconds * 1e9:
        reasons.append("its configuration is behind")
    reasons += [_because(f"alert {identity}", words) for identity, words in sorted(grave_alerts.items())]
    state = AgentState.DEGRADED if reasons else AgentState.ONLINE
    return AgentStanding(state=state, reasons=tuple(reasons))


def is_observing(observed: Observed | None) -> bool:
    """Whether another NGINX than the agent's serves: the agent is then sent nothing to serve."""
    return observed is not None and observed.state in (Hands.OBSERVING, Hands.GIVING_BACK)


def _because(what: str, words: str) -> str:
    return f"{what}: {words}"[:REASON_LIMIT] if words else what
