"""Keeping agents as they should be: connected ones at the desired version, silent ones offline.

Looks at one agent at a time, whatever made it look: a report, a change, a moment. Everything it
does follows from what is so then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from fleetplane.domains.proxies import deployment
from fleetplane.domains.proxies.alerts import GRAVE
from fleetplane.domains.proxies.configs import Configs, Prepared
from fleetplane.domains.proxies.deployment import GiveUp, Send, Settled, Wait
from fleetplane.domains.proxies.kinds import AGENT, CONFIG_VERSION, Agent, Deployment, version_name
from fleetplane.domains.proxies.presence import (
    CLOSED,
    DELETED,
    TIMED_OUT,
    Live,
    Presences,
    Standing,
    standing,
)
from fleetplane.domains.proxies.roster import Roster
from fleetplane.domains.proxies.values import AgentState, DeploymentState
from fleetplane.domains.proxies.wire import Progress, moment
from fleetplane.domains.proxies.workspaces import Workspaces
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Commands
from fleetplane.kernel.liveness import AgentId, Liveness, LivenessPolicy, LivenessTracker
from fleetplane.kernel.reconcile import Reason, Reconciler, Result
from fleetplane.kernel.sessions import ENDED, STOPPING, SUPERSEDED
from fleetplane.kernel.store import Store
from fleetplane.kernel.watch import EventType

log = structlog.get_logger(__name__)

CONCURRENCY = 32
"""Agents looked at at once: enough to fill the store's commits, few enough to leave it for others."""
TICK_SECONDS = 1.0
"""How late silence is noticed at most; it is counted in heartbeats of many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    heartbeat_seconds: int = 30
    missed_heartbeats: int = 3
    reconnect_seconds: float = 10.0
    """How long an agent whose stream ended may be away before it counts as gone."""
    behind_seconds: float = 60.0
    """How long an agent may serve something old before it counts as degraded."""
    apply_seconds: float = 60.0
    """Without a word about a version for so long, it has failed."""
    first_report_seconds: float = 5.0
    """How long to wait for the first report of what an agent serves before sending anyway."""
    debounce_seconds: float = 0.5
    """Changes that follow each other this quickly go out as one."""

    @property
    def silence_seconds(self) -> float:
        return float(self.heartbeat_seconds * self.missed_heartbeats)


_REASONS = {ENDED: CLOSED, STOPPING: "shutdown", SUPERSEDED: SUPERSEDED}
"""Why a session ended, in the words of those who watch."""


class AgentController:
    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        roster: Roster,
        presences: Presences,
        workspaces: Workspaces,
        configs: Configs,
        commands: Commands,
        policy: AgentPolicy,
    ) -> None:
        self._store = store
        self._clock = clock
        self._roster = roster
        self._presences = presences
        self._workspaces = workspaces
        self._configs = configs
        self._commands = commands
        self._policy = policy
        self._started_ns = clock.now_ns()
        silence = policy.silence_seconds
        self._liveness = LivenessTracker(
            LivenessPolicy(stale_after_seconds=silence, dead_after_seconds=silence)
        )
        self.reconciler = Reconciler(
            "proxies/agents", self._look, clock=clock, store=store, concurrency=CONCURRENCY
        )

    # What others tell.

    def look_at(self, agent_id: str, after_seconds: float = 0.0) -> None:
        self.reconciler.enqueue(agent_id, after_seconds)

    def heard_from(self, agent_id: str, live: Live) -> None:
        live.last_seen_ns = self._clock.now_ns()
        for _ in self._liveness.heard_from(AgentId(agent_id), now=self._clock.monotonic()):
            pass

    def take_up(self) -> None:
        """At start: agents that were connected have as long to come back as they may be silent."""
        for agent in self._store.list(AGENT):
            if agent.status is not None and agent.status.state is not AgentState.OFFLINE:
                self.look_at(agent.name, self._policy.silence_seconds)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.reconciler.run(), name="proxies/reconcile")
            tasks.create_task(self._follow_versions(), name="proxies/versions")
            tasks.create_task(self._follow_deletions(), name="proxies/deletions")
            tasks.create_task(self._listen_for_silence(), name="proxies/silence")

    async def _follow_versions(self) -> None:
        async with self._store.watch(CONFIG_VERSION) as watch:
            async for batch in watch:
                scopes = {event.resource.scope for event in batch.events if event.type is EventType.ADDED}
                for agent_id in self._connected_in(scopes):
                    self.look_at(agent_id, self._policy.debounce_seconds)

    def _connected_in(self, scopes: Iterable[str]) -> Iterable[str]:
        for scope in scopes:
            for agent in self._store.list(AGENT, scope):
                if self._presences.open(agent.name) is not None:
                    yield agent.name

    async def _follow_deletions(self) -> None:
        async with self._store.watch(AGENT) as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.type is EventType.DELETED:
                        await self._bury(event.resource)

    async def _bury(self, agent: Agent) -> None:
        self._presences.disconnect(agent.name, reason=DELETED)
        self._presences.forget(agent.name)
        self._liveness.forget(AgentId(agent.name))
        self.reconciler.forget(agent.name)
        await self._commands.removed(agent.name)
        await self._roster.clear(agent)

    async def _listen_for_silence(self) -> None:
        while True:
            await self._clock.sleep(TICK_SECONDS)
            for change in self._liveness.tick(now=self._clock.monotonic()):
                if change.after is Liveness.STALE:
                    self._presences.disconnect(change.agent, reason=TIMED_OUT)
                    self.look_at(change.agent)

    # Looking.

    async def _look(self, agent_id: str) -> Result:
        agent = self._roster.find(agent_id)
        if agent is None:
            self._presences.forget(agent_id)
            return Result()
        live = self._presences.get(agent_id)
        if live is None or not live.session.is_open:
            return await self._look_at_absent(agent, live)
        waiting = await self._configure(agent, live)
        await self._roster.note_standing(agent, self._standing(agent, live), live)
        if waiting is None:
            return Result()
        seconds = min(waiting.seconds or self._policy.behind_seconds, self._policy.behind_seconds)
        reason = Reason(code=waiting.code, message=waiting.message)
        return Result(explanation=(reason,), requeue_after_seconds=seconds)

    async def _look_at_absent(self, agent: Agent, live: Live | None) -> Result:
        if agent.status is None or agent.status.state is AgentState.OFFLINE:
            self._presences.forget(agent.name)
            return Result(explanation=(_AWAY,))
        now_ns = self._clock.now_ns()
        if live is None:
            reason, left = TIMED_OUT, self._seconds_left(self._started_ns, self._policy.silence_seconds)
        else:
            if live.ended_at_ns is None:
                live.ended_at_ns = now_ns
                live.ended_because = _REASONS.get(live.session.reason or "", live.session.reason or CLOSED)
            reason = live.ended_because
            grace = 0.0 if reason == TIMED_OUT else self._policy.reconnect_seconds
            left = self._seconds_left(live.ended_at_ns, grace)
        if left > 0:
            return Result(explanation=(_AWAY,), requeue_after_seconds=left)
        gone = Standing(state=AgentState.OFFLINE, reasons=(reason,))
        await self._roster.note_standing(agent, gone, live)
        if self._presences.open(agent.name) is None:  # it may have come back while that was written
            self._presences.forget(agent.name)
        else:
            self.look_at(agent.name)
        log.info("proxies.agent_disconnected", agent=agent.name, reason=reason)
        return Result(explanation=(_AWAY,))

    def _seconds_left(self, since_ns: int, seconds: float) -> float:
        return seconds - (self._clock.now_ns() - since_ns) / 1e9

    def _standing(self, agent: Agent, live: Live) -> Standing:
        newest = self._workspaces.newest(agent.scope)
        last = None
        if newest is not None:
            found = [one for one in self._roster.deployments(agent) if one.spec.version <= newest.version]
            if found and found[-1].status is not None:
                last = (found[-1].spec.version, found[-1].status.state)
        return standing(
            live,
            last_deployment=last,
            grave_alerts=[
                name for name, spec in self._roster.alerts(agent).items() if spec.severity in GRAVE
            ],
            behind_limit_seconds=self._policy.behind_seconds,
            now_ns=self._clock.now_ns(),
        )

    # Configuration.

    async def _configure(self, agent: Agent, live: Live) -> Wait | None:
        """Bring the agent to the desired version, or say what that waits for; None once it is there."""
        early = self._seconds_left(live.since_ns, self._policy.first_report_seconds)
        if live.serving is None and early > 0:
            return Wait(code="NO_REPORT", message="the agent has not said what it serves", seconds=early)
        newest = self._workspaces.newest(agent.scope)
        if newest is None:
            return Wait(code="NOTHING_TO_SERVE", message="the workspace has no configuration yet")
        if live.is_settled_at(newest.version):
            # Every heartbeat comes by here, and what an agent should serve changes with the version only.
            return None
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
        )
        if not isinstance(decision, Settled) and live.behind_since_ns is None:
            live.behind_since_ns = self._clock.now_ns()
        match decision:
            case Settled(confirm=confirm):
                live.behind_since_ns = None
                assert live.serving is not None
                settled = (wanted.version, live.serving.checksum)
                if confirm:
                    await self._roster.note_progress(agent, _confirmed(prepared))
                live.settled = settled
                return None
            case Send():
                return await self._send(agent, live, prepared)
            case GiveUp():
                await self._roster.note_timeout(agent, wanted.version)
                return Wait(code="SILENT", message=f"no word about version {wanted.version} in time")
            case Wait():
                return decision

    def _deployment(self, agent: Agent, version: int) -> Deployment | None:
        name = version_name(version)
        return next((one for one in self._roster.deployments(agent) if one.name == name), None)

    async def _send(self, agent: Agent, live: Live, prepared: Prepared) -> Wait:
        await self._roster.note_sent(agent, prepared.wanted)
        message = pb.MasterMessage(timestamp=moment(self._clock.now_ns()), config_update=prepared.update)
        if not live.session.offer(message):
            # Either it ended, or its agent has not read for hundreds of messages.
            live.session.close(TIMED_OUT)
            self.look_at(agent.name)
        return Wait(
            code="SENT",
            message=f"version {prepared.wanted.version} is on its way",
            seconds=self._policy.apply_seconds,
        )


_AWAY = Reason(code="AWAY", message="the agent is not connected")


def _confirmed(prepared: Prepared) -> Progress:
    """A report that shows the version in service says as much as the word that got lost."""
    return Progress(
        config_id=prepared.wanted.config_id,
        version=prepared.wanted.version,
        state=DeploymentState.SUCCESS,
        error="",
        applied_at_ns=None,
    )
