"""What the agents' service writes: who came, how they are, how far they are with what.

Each method is one transaction that looks at what is so before it writes: an agent may be deleted
at any moment, and then nothing is written about it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fleetplane.domains.proxies.agents import machines
from fleetplane.domains.proxies.agents.events import AgentEvents
from fleetplane.domains.proxies.agents.live import CHANNEL, AgentStanding, LiveAgent
from fleetplane.domains.proxies.agents.machines import Approach, Holder, MachineVerdict
from fleetplane.domains.proxies.agents.registry import DIGEST, token_digest
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    AGENT_TOKEN,
    DEPLOYMENT,
    ID_CLAIM,
    Agent,
    AgentStatus,
    AgentTokenStatus,
    Deployment,
    DeploymentStatus,
    agent_scope,
    version_name,
)
from fleetplane.domains.proxies.kinds.values import AgentHealth, AgentState, DeploymentState, Observed
from fleetplane.domains.proxies.rules import deployment
from fleetplane.domains.proxies.rules.alerts import ALERT, AlertSpec
from fleetplane.domains.proxies.rules.deployment import ServedVersion, WantedVersion
from fleetplane.domains.proxies.wire import Introduction, VersionProgress
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.freeze import FREEZE, frozen
from fleetplane.kernel.presence import PresenceRegistry
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS

DEPLOYMENTS_KEPT = 100
"""Per agent, the newest: as many as there are versions."""
HEALTH_SECONDS = 300.0
"""Between two notes of an agent's health for other servers: 10,000 agents are 33 writes a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAgent:
    agent: Agent
    took_over: bool
    """From another machine, as somebody had approved."""


class AgentRoster:
    """Of an agent's streams, only the one that its presence names writes about it: one that it has left, on
    this server or another, may still have something to say, and that is not so any more."""

    def __init__(self, store: Store, whereabouts: PresenceRegistry | None = None) -> None:
        """Without `whereabouts`, for who only asks."""
        self._store = store
        self._whereabouts = whereabouts or PresenceRegistry(store, store.clock, channel=CHANNEL)
        self.events = AgentEvents(store)
        """What agents say happened."""

    def _speaks(self, draft: Draft, live: LiveAgent) -> bool:
        """Whether a stream is its agent's session, among all servers."""
        where = self._whereabouts
        return not where.shared or where.named(draft, live.agent) == live.place

    # Finding.

    def find(self, agent_id: str) -> Agent | None:
        scope = self._store.claimed_by(AGENT, "", ID_CLAIM, agent_id)
        return self._store.get(AGENT, scope, agent_id) if scope is not None else None

    def holder(self, token: str) -> Agent:
        """Whose token it is; raises `Unauthenticated` for one that was never made, or was revoked."""
        agent_id = self._store.claimed_by(AGENT_TOKEN, "", DIGEST, token_digest(token)) if token else None
        agent = self.find(agent_id) if agent_id is not None else None
        if agent is None:
            raise Unauthenticated("the token is not known or was revoked", hint="ask for a new token")
        return agent

    def is_activated(self, agent: Agent) -> bool:
        token = self._store.get(AGENT_TOKEN, agent.scope, agent.name)
        return token is not None and token.status is not None

    def deployments(self, agent: Agent) -> list[Deployment]:
        return list(self._store.list(DEPLOYMENT, agent_scope(agent.scope, agent.name)))

    def alerts(self, agent: Agent) -> dict[str, AlertSpec]:
        found = self._store.list(ALERT, agent_scope(agent.scope, agent.name))
        return {alert.name: alert.spec for alert in found}

    # Coming and going.

    async def register(
        self,
        agent: Agent,
        said: Introduction,
        approach: Approach,
        *,
        holder: Holder | None,
        is_back: bool,
        heartbeat_seconds: float,
    ) -> RegisteredAgent | None:
        """Check who comes, activate the token if this is its first use, and take in what the agent says.

        All in one transaction. An activated token stays good until its agent is deleted, or bound to a
        key; its expiry limits the first use only. None for a machine that contends with another one:
        nothing is written then. `is_back`: the last stream was of a machine that looks the same.
        """
        digest = token_digest(said.token)
        scope, name = agent.scope, agent.name

        def change(draft: Draft) -> RegisteredAgent | None:
            token, current = draft.get(AGENT_TOKEN, scope, name), draft.get(AGENT, scope, name)
            if token is None or current is None or (not approach.key and token.spec.digest != digest):
                raise Unauthenticated("the token is not known or was revoked", hint="ask for a new token")
            machines.require_fresh(token, draft.now_ns)
            bound = token.status or AgentTokenStatus(activated_at_ns=draft.now_ns)
            found = machines.verdict(
                approach, bound, holder, heartbeat_seconds=heartbeat_seconds, now_ns=draft.now_ns
            )
            if found is MachineVerdict.CONTENDS:
                return None
            if found is MachineVerdict.TAKES_OVER:
                bound = machines.taken(bound, approach, draft.now_ns)
                machines.clear_alert(draft, agent)
            elif is_back and bound.contender is not None and bound.contender.id == approach.identity:
                # It contended with its own stream, whose connection had broken without a word.
                bound = msgspec.structs.replace(bound, contender=None)
                machines.clear_alert(draft, agent)
            machines.put(draft, token, bound)
            status = _introduced(current.status, said, draft.now_ns)
            if self._whereabouts.shared:
                status = msgspec.structs.replace(status, machine=approach.identity)
            written = draft.put(AGENT, scope, name, spec=current.spec, status=status)
            return RegisteredAgent(agent=written, took_over=found is MachineVerdict.TAKES_OVER)

        done = await self._store.transact(
            change,
            actor=actor(name),
            action="agent.register",
            touches=[AGENT.key(scope, name), *machines.touches(agent)],
        )
        return done.value

    async def note_standing(self, agent: Agent, standing: AgentStanding, live: LiveAgent | None) -> None:
        """Write down how an agent is, if that is news; that it is offline, only if it has no session."""
        scope, name, where = agent.scope, agent.name, self._whereabouts
        place = live.place if live is not None and standing.state is not AgentState.OFFLINE else None

        def change(draft: Draft) -> None:
            current = draft.get(AGENT, scope, name)
            if current is None or current.uid != agent.uid or current.status is None:
                return
            if where.shared and where.named(draft, name) != place:
                return
            status = _moved(current.status, standing, draft.now_ns)
            if status is current.status:
                return
            if live is not None:
                status = msgspec.structs.replace(status, last_seen_at_ns=live.heard_ns, health=live.health)
            draft.put(AGENT, scope, name, spec=current.spec, status=status)

        # As it is by now: whoever looks may have waited since it found the agent, and others write, too.
        known = self._store.get(AGENT, scope, name)
        status = known.status if known is not None else None
        if status is not None and (status.state, status.reasons) != (standing.state, standing.reasons):
            await self._store.transact(
                change, actor=actor(name), action="agent.state", touches=[AGENT.key(scope, name)]
            )

    async def note_observed(self, live: LiveAgent, observed: Observed | None) -> None:
        """Write down what an agent sees of an NGINX that it found, if that is news."""
        agent = live.record
        scope, name = agent.scope, agent.name

        def change(draft: Draft) -> None:
            current = draft.get(AGENT, scope, name)
            if current is None or current.uid != agent.uid or current.status is None:
                return
            if not self._speaks(draft, live):
                return
            if current.status.observed != observed:
                status = msgspec.structs.replace(current.status, observed=observed)
                draft.put(AGENT, scope, name, spec=current.spec, status=status)

        known = self._store.get(AGENT, scope, name)
        if known is not None and known.status is not None and known.status.observed != observed:
            await self._store.transact(
                change, actor=actor(name), action="agent.observe", touches=[AGENT.key(scope, name)]
            )

    async def note_health(self, live: LiveAgent) -> None:
        """Write down which version its NGINX serves, whenever that changes; for other servers, the rest of
        an agent's health now and then."""
        agent = live.record
        known = self._store.get(AGENT, agent.scope, agent.name)
        if known is None or known.status is None or live.health is None:
            return
        is_due = self._whereabouts.shared and live.heard_ns - live.health_noted_ns >= HEALTH_SECONDS * NS
        if not is_due and _serving(known.status.health) == _serving(live.health):
            return
        live.health_noted_ns = live.heard_ns

        def change(draft: Draft) -> None:
            current = draft.get(AGENT, agent.scope, agent.name)
            if current is None or current.status is None or not self._speaks(draft, live):
                return
            status = msgspec.structs.replace(
                current.status, health=live.health, last_seen_at_ns=live.heard_ns
            )
            draft.put(AGENT, agent.scope, agent.name, spec=current.spec, status=status)

        await self._store.transact(
            change,
            actor=actor(agent.name),
            action="agent.health",
            touches=[AGENT.key(agent.scope, agent.name)],
        )

    async def ask_retry(self, agent: Agent) -> bool:
        """Let the server that has an agent know that what failed should be tried; False if none has it."""
        scope, name = agent.scope, agent.name

        def change(draft: Draft) -> bool:
            current = draft.get(AGENT, scope, name)
            if current is None or current.status is None:
                return False
            if self._whereabouts.named(draft, name) is None:
                return False
            status = msgspec.structs.replace(current.status, retry_asked_at_ns=draft.now_ns)
            draft.put(AGENT, scope, name, spec=current.spec, status=status)
            return True

        done = await self._store.transact(
            change, actor=actor(name), action="agent.retry", touches=[AGENT.key(scope, name)]
        )
        return done.value

    # Configuration.

    async def note_sent(self, live: LiveAgent, wanted: WantedVersion) -> bool:
        """A version is on its way; written before it is sent. False if the stream is not the agent's, or the
        agent was deleted or frozen, also at another server that this one has not heard of yet."""
        agent = live.record
        scope = agent_scope(agent.scope, agent.name)
        name = version_name(wanted.version)
        surplus = [old.name for old in self.deployments(agent)[: -DEPLOYMENTS_KEPT + 1] if old.name != name]

        def change(draft: Draft) -> bool:
            if not self._speaks(draft, live) or draft.get(AGENT, agent.scope, agent.name) is None:
                return False
            if frozen(draft.list(FREEZE), scope, draft.now_ns, domain="proxies") is not None:
                return False
            for old in surplus:
                if draft.get(DEPLOYMENT, scope, old) is not None:
                    draft.delete(DEPLOYMENT, scope, old)
            spec, status = deployment.sent(wanted, draft.get(DEPLOYMENT, scope, name), now_ns=draft.now_ns)
            draft.put(DEPLOYMENT, scope, name, spec=spec, status=status)
            return True

        done = await self._store.transact(
            change,
            actor=actor(agent.name),
            action="deployment.send",
            touches=[DEPLOYMENT.key(scope, version) for version in (name, *surplus)],
        )
        return done.value

    async def note_progress(self, live: LiveAgent, said: VersionProgress) -> bool:
        """Record an agent's progress with a version; False if the agent was not sent it."""
        agent = live.record
        scope = agent_scope(agent.scope, agent.name)
        name = version_name(said.version)
        found = self._store.get(DEPLOYMENT, scope, name)
        if found is None or (said.config_id and found.spec.config_id != said.config_id):
            return False
        older = (
            [
                one.name
                for one in self.deployments(agent)
                if one.spec.version < said.version
                and one.status is not None
                and one.status.state not in deployment.FINAL
            ]
            if said.state in deployment.FINAL
            else []
        )

        def change(draft: Draft) -> None:
            current = draft.get(DEPLOYMENT, scope, name)
            if current is None or current.status is None or not self._speaks(draft, live):
                return
            status = deployment.advanced(
                current.status, said, sent_at_ns=current.spec.sent_at_ns, now_ns=draft.now_ns
            )
            if status is None:
                return
            draft.put(DEPLOYMENT, scope, name, spec=current.spec, status=status)
            for old in older:
                _overtake(draft, scope, old, by=said.version)

        await self._store.transact(
            change,
            actor=actor(agent.name),
            action=f"deployment.{said.state}",
            touches=[DEPLOYMENT.key(scope, one) for one in (name, *older)],
        )
        return True

    async def note_served(self, live: LiveAgent, serving: ServedVersion) -> None:
        """A report shows a version in service: that is so, whatever was said or not said about it."""
        agent = live.record
        scope = agent_scope(agent.scope, agent.name)
        found = self._store.get(DEPLOYMENT, scope, version_name(serving.version))
        if found is None or found.status is None or found.status.state is DeploymentState.SUCCESS:
            return
        if deployment.is_tried_again(found.status):
            return  # it was served before; how this try went is the agent's to say
        if serving.checksum in ("", found.spec.checksum) and found.status.changed_at_ns < serving.at_ns:
            await self.note_progress(live, observed(found.spec.config_id, serving.version))

    async def note_timeout(self, live: LiveAgent, version: int) -> None:
        agent = live.record
        scope = agent_scope(agent.scope, agent.name)

        def change(draft: Draft) -> None:
            if self._speaks(draft, live):
                _end(draft, scope, version_name(version), deployment.TIMED_OUT)

        await self._store.transact(
            change,
            actor=actor(agent.name),
            action="deployment.timeout",
            touches=[DEPLOYMENT.key(scope, version_name(version))],
        )

    # Alerts.

    async def note_alerts(
        self, agent: Agent, changed: Mapping[str, AlertSpec | None], live: LiveAgent | None = None
    ) -> None:
        """`live` is whose report they follow from."""
        scope = agent_scope(agent.scope, agent.name)

        def change(draft: Draft) -> None:
            if live is not None and not self._speaks(draft, live):
                return
            gone = draft.get(AGENT, agent.scope, agent.name) is None
            for name, spec in changed.items():
                if spec is not None and not gone:
                    draft.put(ALERT, scope, name, spec=spec)
                elif draft.get(ALERT, scope, name) is not None:
                    draft.delete(ALERT, scope, name)

        await self._store.transact(
            change,
            actor=actor(agent.name),
            action="agent.alerts",
            touches=[ALERT.key(scope, name) for name in changed],
        )

    async def clear(self, agent: Agent) -> None:
        """Remove what is left of an agent that was deleted."""
        open_ = self.alerts(agent)
        if open_:
            await self.note_alerts(agent, dict.fromkeys(open_))
        await self.events.clear(agent, actor=actor(agent.name))
        scope = agent_scope(agent.scope, agent.name)
        left = [one.name for one in self.deployments(agent)]

        def change(draft: Draft) -> None:
            for name in left:
                if draft.get(DEPLOYMENT, scope, name) is not None:
                    draft.delete(DEPLOYMENT, scope, name)

        if left:
            touches = [DEPLOYMENT.key(scope, name) for name in left]
            await self._store.transact(change, actor=actor(agent.name), action="agent.clear", touches=touches)


def actor(agent_id: str) -> str:
    return f"agent/{agent_id}"


def _introduced(before: AgentStatus | None, said: Introduction, now_ns: int) -> AgentStatus:
    away = before is None or before.state is AgentState.OFFLINE
    return AgentStatus(
        state=AgentState.ONLINE if away or before is None else before.state,
        hostname=said.hostname,
        ip_address=said.ip_address,
        version=said.version,
        deployment_mode=said.deployment_mode,
        capabilities=said.capabilities,
        labels=said.labels,
        last_seen_at_ns=now_ns,
        health=before.health if before is not None else None,
        reasons=() if away or before is None else before.reasons,
        state_changed_at_ns=now_ns if away or before is None else before.state_changed_at_ns,
        connected_at_ns=now_ns if away or before is None else before.connected_at_ns,
        disconnected_at_ns=before.disconnected_at_ns if before is not None else None,
        observed=before.observed if before is not None else None,
    )


def _serving(health: AgentHealth | None) -> tuple[str, int] | None:
    """What of an agent's health is worth a write as soon as it changes."""
    return None if health is None else (health.nginx_status, health.config_version)


def _moved(status: AgentStatus, standing: AgentStanding, now_ns: int) -> AgentStatus:
    if (status.state, status.reasons) == (standing.state, standing.reasons):
        return status
    came = status.state is AgentState.OFFLINE and standing.state is not AgentState.OFFLINE
    went = standing.state is AgentState.OFFLINE and status.state is not AgentState.OFFLINE
    return msgspec.structs.replace(
        status,
        state=standing.state,
        reasons=standing.reasons,
        state_changed_at_ns=now_ns if status.state is not standing.state else status.state_changed_at_ns,
        connected_at_ns=now_ns if came else status.connected_at_ns,
        disconnected_at_ns=now_ns if went else status.disconnected_at_ns,
    )


def observed(config_id: str, version: int) -> VersionProgress:
    """The progress that a report with this version in service proves, where the agent's message was lost."""
    return VersionProgress(
        config_id=config_id,
        version=version,
        state=DeploymentState.SUCCESS,
        error="",
        applied_at_ns=None,
        observed=True,
    )


def _overtake(draft: Draft, scope: str, name: str, *, by: int) -> None:
    current = draft.get(DEPLOYMENT, scope, name)
    if current is None or current.status is None or current.status.state in deployment.FINAL:
        return
    sent_at_ns = current.spec.sent_at_ns
    status = deployment.overtaken(current.status, by, sent_at_ns=sent_at_ns, now_ns=draft.now_ns)
    draft.put(DEPLOYMENT, scope, name, spec=current.spec, status=status)


def _end(draft: Draft, scope: str, name: str, error: str) -> None:
    """End a deployment that its agent did not end."""
    current = draft.get(DEPLOYMENT, scope, name)
    if current is None or current.status is None or current.status.state in deployment.FINAL:
        return
    status = DeploymentStatus(
        state=DeploymentState.FAILED,
        error=error,
        changed_at_ns=draft.now_ns,
        applied_at_ns=current.status.applied_at_ns,
        duration_ms=(draft.now_ns - current.spec.sent_at_ns) // 1_000_000,
    )
    draft.put(DEPLOYMENT, scope, name, spec=current.spec, status=status)
