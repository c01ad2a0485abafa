"""Keeping agents as they should be: connected ones at the desired version, silent ones offline.

Looks at one agent at a time, whatever made it look: a report, a change, a moment. Everything it
does follows from what is so then. Of several servers each does this for the agents that are connected to it;
the one that has the seat sees to those that nobody has any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import structlog
from msgspec import UNSET

from fleetplane.domains.proxies.agents.live import (
    CHANNEL,
    CLOSED,
    DELETED,
    TIMED_OUT,
    AgentPresences,
    AgentStanding,
    LiveAgent,
    is_observing,
    standing,
)
from fleetplane.domains.proxies.agents.records import AgentRoster, actor, observed
from fleetplane.domains.proxies.agents.registry import REVOKED
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    AGENT_TOKEN,
    CONFIG_VERSION,
    Agent,
    AgentToken,
    Deployment,
    agent_scope,
    version_name,
)
from fleetplane.domains.proxies.kinds.values import AgentState, Observed
from fleetplane.domains.proxies.rules import deployment
from fleetplane.domains.proxies.rules.alerts import GRAVE, AlertPolicy
from fleetplane.domains.proxies.rules.deployment import (
    DeploymentWait,
    GiveUpVersion,
    RetryPolicy,
    Send,
    Settled,
)
from fleetplane.domains.proxies.serving.agent_configs import Configs, Prepared
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.wire import moment
from fleetplane.fleet import freeze as freezing
from fleetplane.fleet.freeze import FROZEN, Freezes
from fleetplane.fleet.streams.silence import SilenceWatch
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Commands
from fleetplane.kernel.liveness import LivenessChanged, LivenessPolicy
from fleetplane.kernel.presence import PRESENCE, PresenceRegistry
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.reconcile import Explanation, PassResult, Reason, Reconciler
from fleetplane.kernel.reconcile.lease import LocalLease
from fleetplane.kernel.sessions import ENDED, STOPPING, SUPERSEDED
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import EventType

log = structlog.get_logger(__name__)

CONCURRENCY = 32
"""Agents looked at at once: enough to fill the store's commits, few enough to leave it for others."""

DEPARTED_SECONDS = 5.0
"""What the server that an agent left has, beyond the time to reconnect, to write that it is offline."""

AHEAD_LIMIT = 1_000_000
"""How far above the newest version an agent may claim to be and be believed: a backup that is a year
old misses as many if somebody edits every half a minute. Numbers are good for 10^12 versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    heartbeat_seconds: int = 30
    reported_labels: bool = True
    """Whether labels that agents report are kept; they never place hosts."""
    missed_heartbeats: int = 3
    reconnect_seconds: float = 10.0
    """How long an agent whose stream ended may be away before it counts as gone."""
    behind_seconds: float = 60.0
    """How long an agent may serve something old before it counts as degraded."""
    apply_seconds: float = 60.0
    """Seconds without a status of a version after which it has failed."""
    first_report_seconds: float = 5.0
    """How long to wait for the first report of what an agent serves before sending anyway."""
    debounce_seconds: float = 0.5
    """Changes that follow each other this quickly go out as one."""
    debounce_limit_seconds: float = 5.0
    """How long a change waits for others at most, however steadily they come."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Of versions that failed for a passing reason."""
    alerts: AlertPolicy = field(default_factory=AlertPolicy)
    """Which figures of an agent's machine are worth an alert."""
    ahead_gap_seconds: float = 30.0
    """Between two versions made because an agent reported a higher one: each reaches every agent of
    its workspace, and one that lies must not keep them all busy."""

    @property
    def silence_seconds(self) -> float:
        return float(self.heartbeat_seconds * self.missed_heartbeats)


_REASONS = {ENDED: CLOSED, STOPPING: "shutdown", SUPERSEDED: SUPERSEDED}
"""Why a session ended, as event subscribers see it."""


class AgentController:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        roster: AgentRoster,
        presences: AgentPresences,
        workspaces: Workspaces,
        configs: Configs,
        commands: Commands,
        policy: AgentPolicy,
        whereabouts: PresenceRegistry,
        heard: LastSeen,
        attention: StallDetector | None = None,
    ) -> None:
        self._heard = heard
        self._whereabouts = whereabouts
        self._attention = attention or StallDetector(clock)
        self._store = store
        self._clock = clock
        self._roster = roster
        self._presences = presences
        self._workspaces = workspaces
        self._configs = configs
        self._commands = commands
        self._policy = policy
        self._freezes = Freezes(store, clock)
        self._started_ns = clock.now_ns()
        self._departed: dict[str, int] = {}
        """Sessions of agents that had their time to reconnect after a server was gone."""
        self._overtook: dict[str, float] = {}
        """When a workspace's versions last went on above a reported one."""
        lasting = LivenessPolicy(
            stale_after_seconds=policy.silence_seconds, dead_after_seconds=math.inf
        )  # an agent that is silent is disconnected: there is no second stage
        self._watch = SilenceWatch(clock, lasting, self._attention)
        name = "proxies/agents"
        self.reconciler = Reconciler(
            name,
            self._look,
            clock=clock,
            store=store,
            concurrency=CONCURRENCY,
            lease=LocalLease(name) if whereabouts.shared else None,
        )

    # What others tell.

    def look_at(self, agent_id: str, after_seconds: float = 0.0) -> None:
        self.reconciler.enqueue(agent_id, after_seconds)

    def heard_from(self, agent_id: str, live: LiveAgent) -> None:
        live.heard_ns = self._clock.now_ns()
        self._watch.heard(agent_id)
        if self._whereabouts.shared:
            self._heard.note(agent_id)

    def retry(self, agent: Agent) -> bool:
        """Have what failed at an agent tried again now; False if it is not connected to this server."""
        live = self._presences.get(agent.name)
        if live is None:
            return False
        live.retry_asked = True
        live.settled = None
        self.look_at(agent.name)
        return True

    async def retried(self, agent: Agent) -> bool:
        """The same of an agent that is connected to any server."""
        return self.retry(agent) or (self._whereabouts.shared and await self._roster.ask_retry(agent))

    def explain(self, agent_id: str) -> Explanation | None:
        """What the last look at an agent found; of one at another server, which that is."""
        server = self._whereabouts.server_of(agent_id)
        if not server or self._presences.get(agent_id) is not None:
            return self.reconciler.explain(agent_id)
        reason = Reason(code="ELSEWHERE", message=f"the agent is connected to the server {server}")
        return Explanation(key=agent_id, at_ns=self._clock.now_ns(), reasons=(reason,))

    def take_over(self) -> None:
        """Give agents that were connected as long to come back as they may be silent, from now on."""
        self._started_ns = self._clock.now_ns()
        for agent in self._store.list(AGENT):
            if agent.status is not None and agent.status.state is not AgentState.OFFLINE:
                self.look_at(agent.name, self._policy.silence_seconds)

    async def run_here(self) -> None:
        """See to the agents that are connected to this server, until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("proxies/reconcile", self.reconciler.run)
            tasks.keep("proxies/versions", self._follow_versions)
            tasks.keep("proxies/deletions", self._follow_agents)
            tasks.keep("proxies/silence", partial(self._watch.run, self._fell_silent))
            tasks.keep("proxies/freezes", partial(self._freezes.follow, self._thaw))
            if self._whereabouts.shared:
                tasks.keep("proxies/tokens", self._follow_tokens)

    async def run_active(self) -> None:
        """See to the agents that no server has any more, until cancelled."""
        if not self._whereabouts.shared:
            return
        async with Boundary() as tasks:
            tasks.keep("proxies/presences", self._follow_presences)
            gone = partial(self._whereabouts.run_for_all, self._session_ended)
            tasks.keep("proxies/departures", gone)

    async def _follow_versions(self) -> None:
        async with self._store.watch(CONFIG_VERSION) as watch:
            async for batch in watch:
                scopes = {event.resource.scope for event in batch.events if event.type is EventType.ADDED}
                for agent_id in self._connected_in(scopes):
                    self.look_at(agent_id, self._policy.debounce_seconds)

    def _connected_in(self, scopes: Iterable[str]) -> Iterable[str]:
        for scope in scopes:
            for agent in self._store.list(AGENT, scope):
                if self._presences.get(agent.name) is not None:
                    yield agent.name

    async def _follow_agents(self) -> None:
        async with self._store.watch(AGENT) as watch:
            async for batch in watch:
                for event in batch.events:
                    with contained("proxies/deletions", about=event.resource.name):
                        if event.type is EventType.DELETED:
                            await self._bury(event.resource)
                        elif self._whereabouts.shared:
                            self._note_retry(event.resource)

    def _note_retry(self, agent: Agent) -> None:
        """Somebody may have asked, at another server, to have what failed here tried again."""
        live = self._presences.get(agent.name)
        asked = agent.status.retry_asked_at_ns if agent.status is not None else UNSET
        if live is not None and asked and asked > max(live.retry_heard_ns, live.since_ns):
            live.retry_heard_ns = asked
            self.retry(agent)

    async def _follow_tokens(self) -> None:
        """End streams whose credential was replaced, on whichever server."""
        async with self._store.watch(AGENT_TOKEN) as watch:
            async for batch in watch:
                for event in batch.events:
                    token = self._store.get(AGENT_TOKEN, event.resource.scope, event.resource.name)
                    live = self._presences.get(event.resource.name)
                    reason = _refusal(live, token) if live is not None and token is not None else ""
                    if live is not None and reason:
                        self._presences.disconnect(live.agent, reason=reason)

    async def _follow_presences(self) -> None:
        """Look at agents that have left a server, once that would have seen to them: it may be gone, too."""
        seconds = self._policy.reconnect_seconds + DEPARTED_SECONDS
        async with self._store.watch(PRESENCE, CHANNEL) as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.type is not EventType.DELETED and not event.resource.spec.is_open:
                        self.look_at(event.resource.name, seconds)

    async def _session_ended(self, agent_id: str, session: int) -> None:
        """A server is gone, and an agent that it had has not come to another one in time."""
        await self._commands.lost(agent_id, session=session)
        self._departed[agent_id] = session
        self.look_at(agent_id)

    def _thaw(self, _scope: str) -> None:
        """Re-examine connected agents after a freeze was set or lifted."""
        for live in self._presences:
            self.look_at(live.agent)

    async def _bury(self, agent: Agent) -> None:
        self._presences.disconnect(agent.name, reason=DELETED)
        self._presences.forget(agent.name)
        self._watch.forget(agent.name)
        self.reconciler.forget(agent.name)
        if self._store.leads:
            await self._commands.removed(agent.name)
            await self._roster.clear(agent)
            await self._whereabouts.forget(agent.name)
            await self._heard.forget(agent.name)

    def _fell_silent(self, change: LivenessChanged) -> None:
        self._presences.disconnect(change.agent, reason=TIMED_OUT)
        self.look_at(change.agent)

    # Looking.

    async def _look(self, agent_id: str) -> PassResult:
        agent = self._roster.find(agent_id)
        if agent is None:
            self._presences.forget(agent_id)
            return PassResult()
        live = self._presences.current(agent_id)
        if live is None or not live.session.is_open:
            if self._whereabouts.shared:
                return await self._look_at_distant(agent, live)
            return await self._look_at_absent(agent, live)
        waiting = await self._configure(agent, live)
        await self._roster.note_standing(agent, self._standing(agent, live), live)
        if waiting is None:
            return PassResult()
        seconds = min(waiting.seconds or self._policy.behind_seconds, self._policy.behind_seconds)
        reason = Reason(code=waiting.code, message=waiting.message)
        return PassResult(explanation=(reason,), requeue_after_seconds=seconds)

    async def _look_at_distant(self, agent: Agent, live: LiveAgent | None) -> PassResult:
        """An agent that is not connected here: it may be elsewhere, and is ours only if it left from here."""
        if self._whereabouts.is_anywhere(agent.name):
            if live is not None and live.is_over:
                self._presences.forget(agent.name)
                self._watch.forget(agent.name)
            return PassResult()
        if live is None and not self._store.leads:
            return PassResult()  # the active server sees to it
        return await self._look_at_absent(agent, live)

    async def _look_at_absent(self, agent: Agent, live: LiveAgent | None) -> PassResult:
        if agent.status is None or agent.status.state is AgentState.OFFLINE:
            self._presences.forget(agent.name)
            return PassResult(explanation=(_AWAY,))
        now_ns = self._clock.now_ns()
        if live is None:
            reason, left = self._gone_for(agent)
        else:
            if live.ended_at_ns is None:
                live.ended_at_ns = now_ns
                live.ended_because = _REASONS.get(live.session.reason or "", live.session.reason or CLOSED)
            reason = live.ended_because
            grace = 0.0 if reason == TIMED_OUT else self._policy.reconnect_seconds
            left = self._seconds_left(self._last_known_ns(agent, live.ended_at_ns), grace)
        if left > 0:
            return PassResult(explanation=(_AWAY,), requeue_after_seconds=left)
        gone = AgentStanding(state=AgentState.OFFLINE, reasons=(reason,))
        await self._roster.note_standing(agent, gone, live)
        if self._presences.get(agent.name) is None:  # it may have come back while that was written
            self._presences.forget(agent.name)
        else:
            self.look_at(agent.name)
        log.info("proxies.agent_disconnected", agent=agent.name, reason=reason)
        return PassResult(explanation=(_AWAY,))

    def _gone_for(self, agent: Agent) -> tuple[str, float]:
        """Why an agent that never was here counts as gone, and in how many seconds it does."""
        found = self._store.get(PRESENCE, CHANNEL, agent.name) if self._whereabouts.shared else None
        if found is None:  # of the time before this server
            return TIMED_OUT, self._seconds_left(self._started_ns, self._policy.silence_seconds)
        if self._departed.pop(agent.name, None) == found.spec.session:
            return CLOSED, 0.0
        since_ns = self._last_known_ns(agent, found.spec.left_at_ns)
        return CLOSED, self._seconds_left(since_ns, self._policy.reconnect_seconds)

    def _last_known_ns(self, agent: Agent, left_at_ns: int) -> int:
        """When an agent was last somewhere: it may have registered with another server since it left."""
        seen_ns = agent.status.last_seen_at_ns if agent.status is not None else None
        return max(left_at_ns, seen_ns or 0) if self._whereabouts.shared else left_at_ns

    def _seconds_left(self, since_ns: int, seconds: float) -> float:
        """The seconds left of a period that began then; gaps of the server itself do not count."""
        now_ns = self._clock.now_ns()
        return seconds - (now_ns - self._watch.term.fair_ns(since_ns, now_ns=now_ns)) / 1e9

    def _standing(self, agent: Agent, live: LiveAgent) -> AgentStanding:
        newest = self._workspaces.newest(agent.scope)
        last = None
        if newest is not None:
            found = [one for one in self._roster.deployments(agent) if one.spec.version <= newest.version]
            if found and found[-1].status is not None:
                last = (found[-1].spec.version, found[-1].status)
        return standing(
            live,
            last_deployment=last,
            grave_alerts={
                name: spec.message
                for name, spec in self._roster.alerts(agent).items()
                if spec.severity in GRAVE
            },
            behind_limit_seconds=self._policy.behind_seconds,
            now_ns=self._clock.now_ns(),
        )

    # Configuration.

    async def _configure(self, agent: Agent, live: LiveAgent) -> DeploymentWait | None:
        """Bring the agent to the desired version, or say what that waits for; None once it is there."""
        early = self._seconds_left(live.since_ns, self._policy.first_report_seconds)
        if live.serving is None and early > 0:
            return DeploymentWait(
                code="NO_REPORT", message="the agent has not said what it serves", seconds=early
            )
        if is_observing(self._observed(agent, live)):
            live.behind_since_ns = None
            return DeploymentWait(code="OBSERVING", message="the agent observes an NGINX that is not its own")
        newest = self._workspaces.newest(agent.scope)
        if newest is None:
            return DeploymentWait(code="NOTHING_TO_SERVE", message="the workspace has no configuration yet")
        if live.is_settled_at(newest.version):
            # Every heartbeat comes by here, and what an agent should serve changes with the version only.
            return None
        if live.serving is not None and live.serving.version > newest.version:
            live.behind_since_ns = live.behind_since_ns or self._clock.now_ns()
            if (held := self._frozen(agent)) is not None:
                return held
            return await self._overtake(agent, live.serving.version, newest.version)
        prepared = await self._configs.prepare(
            self._workspaces.share(agent, newest), workspace=agent.scope.rpartition("/")[2]
        )
        wanted = prepared.wanted
        decision = deployment.decide(
            wanted,
            live.serving,
            self._deployment(agent, wanted.version),
            session_since_ns=live.since_ns,
            apply_seconds=self._policy.apply_seconds,
            now_ns=self._clock.now_ns(),
            retry=self._policy.retry,
            stirred_ns=live.stirred_ns,
            asked=live.retry_asked,
            known=bool(self._roster.deployments(agent)),
        )
        if isinstance(decision, Send) and (hold := self._hold_seconds(agent)) > 0:
            decision = DeploymentWait(code="GATHERING", message="waiting for changes to settle", seconds=hold)
        if isinstance(decision, Send) and (held := self._frozen(agent)) is not None:
            decision = held
        if not isinstance(decision, Settled) and live.behind_since_ns is None:
            live.behind_since_ns = self._clock.now_ns()
        match decision:
            case Settled(confirm=confirm):
                live.behind_since_ns = None
                assert live.serving is not None
                settled = (wanted.version, live.serving.checksum)
                live.retry_asked = False
                if confirm:
                    await self._roster.note_progress(live, observed(wanted.config_id, wanted.version))
                    self.look_at(agent.name)  # parts of it may have been set aside
                else:
                    live.settled = settled
                return None
            case Send():
                live.retry_asked = False
                return await self._send(agent, live, prepared)
            case GiveUpVersion() if not self._attention.settled:
                return DeploymentWait(
                    code="LISTENING", message="the server has just come back from a gap", seconds=1.0
                )
            case GiveUpVersion():
                await self._roster.note_timeout(live, wanted.version)
                return DeploymentWait(
                    code="SILENT", message=f"no word about version {wanted.version} in time"
                )
            case DeploymentWait():
                return decision

    @staticmethod
    def _observed(agent: Agent, live: LiveAgent) -> Observed | None:
        """What it reported last, also on an earlier stream."""
        if live.serving is not None or agent.status is None:
            return live.observed
        return agent.status.observed

    def _frozen(self, agent: Agent) -> DeploymentWait | None:
        """What sending to an agent waits for if it is frozen, also what somebody asked to be tried again."""
        freeze = self._freezes.holding("proxies", agent_scope(agent.scope, agent.name))
        if freeze is None:
            return None
        seconds = self._freezes.seconds_left(freeze, at_most=self._policy.behind_seconds)
        return DeploymentWait(code=FROZEN, message=freezing.message(freeze), seconds=seconds)

    def _hold_seconds(self, agent: Agent) -> float:
        """How long a version that this agent was not sent yet waits for others to follow it."""
        newest_sent = max((one.spec.version for one in self._roster.deployments(agent)), default=0)
        return deployment.hold_seconds(
            self._workspaces.made_after(agent.scope, newest_sent),
            quiet_seconds=self._policy.debounce_seconds,
            longest_seconds=self._policy.debounce_limit_seconds,
            now_ns=self._clock.now_ns(),
        )

    async def _overtake(self, agent: Agent, reported: int, newest: int) -> DeploymentWait:
        """Let the workspace's versions go on above one that an agent serves and this store has not.

        That is so after an older state of the store was restored: the agent refuses lower numbers.
        """
        if reported - newest > AHEAD_LIMIT:
            message = f"the agent reports version {reported}; the workspace is at {newest}"
            return DeploymentWait(code="FAR_AHEAD", message=message)
        left = self._policy.ahead_gap_seconds - (
            self._clock.monotonic() - self._overtook.get(agent.scope, -self._policy.ahead_gap_seconds)
        )
        if left > 0:
            message = f"the agent serves version {reported}, which is not known here"
            return DeploymentWait(code="AHEAD", message=message, seconds=left)
        self._overtook[agent.scope] = self._clock.monotonic()
        reports = [self._presences.serving(one) for one in self._connected_in([agent.scope])]
        highest = max(
            (one.version for one in reports if one is not None and one.version - newest <= AHEAD_LIMIT),
            default=reported,
        )
        log.warning("proxies.agent_ahead", agent=agent.name, reported=reported, newest=newest)
        await self._workspaces.redeploy(
            agent.scope, cause="agent.ahead", subject=agent.name, actor=actor(agent.name), above=highest
        )
        self.look_at(agent.name)
        return DeploymentWait(code="AHEAD", message=f"versions go on above {highest}, which an agent serves")

    def _deployment(self, agent: Agent, version: int) -> Deployment | None:
        name = version_name(version)
        return next((one for one in self._roster.deployments(agent) if one.name == name), None)

    async def _send(self, agent: Agent, live: LiveAgent, prepared: Prepared) -> DeploymentWait:
        if not await self._roster.note_sent(live, prepared.wanted):
            gone = DeploymentWait(
                code="ELSEWHERE", message="the agent was deleted, or has a newer session elsewhere"
            )
            return self._frozen(agent) or gone
        message = pb.MasterMessage(timestamp=moment(self._clock.now_ns()), config_update=prepared.update)
        if not live.session.offer(message):
            # Either it ended, or its agent has not read for hundreds of messages.
            live.session.close(TIMED_OUT)
            self.look_at(agent.name)
        return DeploymentWait(
            code="SENT",
            message=f"version {prepared.wanted.version} is on its way",
            seconds=self._policy.apply_seconds,
        )


def _refusal(live: LiveAgent, token: AgentToken) -> str:
    """Why what a stream came with lets nobody in any more; empty if it still does."""
    bound = token.status.key if token.status is not None else ""
    if live.key:
        return "" if live.key == bound else REVOKED
    if live.digest != token.spec.digest:
        return REVOKED
    return SUPERSEDED if bound else ""  # the agent has exchanged its token for a certificate


_AWAY = Reason(code="AWAY", message="the agent is not connected")
