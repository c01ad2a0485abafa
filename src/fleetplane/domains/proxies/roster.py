"""What the agents' service writes: who came, how they are, how far they are with what.

Each method is one transaction that looks at what is so before it writes: an agent may be deleted
at any moment, and then nothing is written about it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fleetplane.domains.proxies import deployment
from fleetplane.domains.proxies.agents import DIGEST, token_digest
from fleetplane.domains.proxies.alerts import ALERT, AlertSpec
from fleetplane.domains.proxies.deployment import Wanted
from fleetplane.domains.proxies.kinds import (
    AGENT,
    AGENT_TOKEN,
    DEPLOYMENT,
    ID_CLAIM,
    Agent,
    AgentStatus,
    AgentTokenStatus,
    Deployment,
    DeploymentSpec,
    DeploymentStatus,
    agent_scope,
    version_name,
)
from fleetplane.domains.proxies.presence import Live, Standing
from fleetplane.domains.proxies.values import AgentState, DeploymentState
from fleetplane.domains.proxies.wire import Introduction, Progress
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.store import Draft, Store

DEPLOYMENTS_KEPT = 50
"""Per agent, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    agent: Agent
    labels_changed: bool


class Roster:
    def __init__(self, store: Store) -> None:
        self._store = store

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

    async def register(self, said: Introduction) -> Registered:
        """Check the token, activate it if this is its first use, and take in what the agent says.

        All in one transaction. An activated token stays good until its agent is deleted; its
        expiry limits the first use only.
        """
        digest = token_digest(said.token)
        agent = self.holder(said.token)
        scope, name = agent.scope, agent.name

        def change(draft: Draft) -> Registered:
            token, current = draft.get(AGENT_TOKEN, scope, name), draft.get(AGENT, scope, name)
            if token is None or current is None or token.spec.digest != digest:
                raise Unauthenticated("the token is not known or was revoked", hint="ask for a new token")
            if token.status is None:
                if draft.now_ns >= token.spec.expires_at_ns:
                    raise Unauthenticated("the token has expired", hint="ask for a new token")
                activated = AgentTokenStatus(activated_at_ns=draft.now_ns)
                draft.put(AGENT_TOKEN, scope, name, spec=token.spec, status=activated)
            before = current.status
            status = _introduced(before, said, draft.now_ns)
            written = draft.put(AGENT, scope, name, spec=current.spec, status=status)
            old = before.labels if before is not None else {}
            return Registered(agent=written, labels_changed=old != said.labels)

        done = await self._store.transact(
            change, actor=actor(name), action="agent.register",
            touches=[AGENT.key(scope, name), AGENT_TOKEN.key(scope, name)],
        )  # fmt: skip
        return done.value

    async def note_standing(self, agent: Agent, standing: Standing, live: Live | None) -> None:
        """Write down how an agent is, if that is news."""
        scope, name = agent.scope, agent.name

        def change(draft: Draft) -> None:
            current = draft.get(AGENT, scope, name)
            if current is None or current.uid != agent.uid or current.status is None:
                return
            status = _moved(current.status, standing, draft.now_ns)
            if status is current.status:
                return
            if live is not None:
                status = msgspec.structs.replace(
                    status, last_seen_at_ns=live.last_seen_ns, health=live.health
                )
            draft.put(AGENT, scope, name, spec=current.spec, status=status)

        status = agent.status
        if status is not None and (status.state, status.reasons) != (standing.state, standing.reasons):
            await self._store.transact(
                change, actor=actor(name), action="agent.state", touches=[AGENT.key(scope, name)]
            )

    # Configuration.

    async def note_sent(self, agent: Agent, wanted: Wanted) -> None:
        """A version is on its way; written before it is sent."""
        scope = agent_scope(agent.scope, agent.name)
        name = version_name(wanted.version)
        surplus = [old.name for old in self.deployments(agent)[: -DEPLOYMENTS_KEPT + 1] if old.name != name]

        def change(draft: Draft) -> None:
            if draft.get(AGENT, agent.scope, agent.name) is None:
                return
            for old in surplus:
                if draft.get(DEPLOYMENT, scope, old) is not None:
                    draft.delete(DEPLOYMENT, scope, old)
            spec = DeploymentSpec(
                version=wanted.version, config_id=wanted.config_id, checksum=wanted.checksum,
                sent_at_ns=draft.now_ns,
            )  # fmt: skip
            status = DeploymentStatus(state=DeploymentState.PENDING, changed_at_ns=draft.now_ns)
            draft.put(DEPLOYMENT, scope, name, spec=spec, status=status)

        await self._store.transact(
            change, actor=actor(agent.name), action="deployment.send",
            touches=[DEPLOYMENT.key(scope, version) for version in (name, *surplus)],
        )  # fmt: skip

    async def note_progress(self, agent: Agent, said: Progress) -> bool:
        """An agent's word about a version; False if it was about none that it was sent."""
        scope = agent_scope(agent.scope, agent.name)
        name = version_name(said.version)
        found = self._store.get(DEPLOYMENT, scope, name)
        if found is None or (said.config_id and found.spec.config_id != said.config_id):
            return False
        older = [
            one.name
            for one in self.deployments(agent)
            if one.spec.version < said.version and one.status is not None
            and one.status.state not in deployment.FINAL
        ] if said.state in deployment.FINAL else []  # fmt: skip

        def change(draft: Draft) -> None:
            current = draft.get(DEPLOYMENT, scope, name)
            if current is None or current.status is None:
                return
            status = deployment.advanced(
                current.status, said, sent_at_ns=current.spec.sent_at_ns, now_ns=draft.now_ns
            )
            if status is None:
                return
            draft.put(DEPLOYMENT, scope, name, spec=current.spec, status=status)
            for old in older:
                _end(draft, scope, old, deployment.superseded(said.version))

        await self._store.transact(
            change, actor=actor(agent.name), action=f"deployment.{said.state}",
            touches=[DEPLOYMENT.key(scope, one) for one in (name, *older)],
        )  # fmt: skip
        return True

    async def note_timeout(self, agent: Agent, version: int) -> None:
        scope = agent_scope(agent.scope, agent.name)
        await self._store.transact(
            lambda draft: _end(draft, scope, version_name(version), deployment.TIMED_OUT),
            actor=actor(agent.name),
            action="deployment.timeout",
            touches=[DEPLOYMENT.key(scope, version_name(version))],
        )

    # Alerts.

    async def note_alerts(self, agent: Agent, changed: Mapping[str, AlertSpec | None]) -> None:
        scope = agent_scope(agent.scope, agent.name)

        def change(draft: Draft) -> None:
            gone = draft.get(AGENT, agent.scope, agent.name) is None
            for name, spec in changed.items():
                if spec is not None and not gone:
                    draft.put(ALERT, scope, name, spec=spec)
                elif draft.get(ALERT, scope, name) is not None:
                    draft.delete(ALERT, scope, name)

        await self._store.transact(
            change, actor=actor(agent.name), action="agent.alerts",
            touches=[ALERT.key(scope, name) for name in changed],
        )  # fmt: skip

    async def clear(self, agent: Agent) -> None:
        """Remove what is left of an agent that was deleted."""
        open_ = self.alerts(agent)
        if open_:
            await self.note_alerts(agent, dict.fromkeys(open_))
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
    )


def _moved(status: AgentStatus, standing: Standing, now_ns: int) -> AgentStatus:
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


def _end(draft: Draft, scope: str, name: str, error: str) -> None:
    """End a deployment that its agent did not end."""
    current = draft.get(DEPLOYMENT, scope, name)
    if current is None or current.status is None or current.status.state in deployment.FINAL:
        return
    status = DeploymentStatus(
        state=DeploymentState.FAILED,
        error=error,
        changed_at_ns=draft.now_ns,
        duration_ms=(draft.now_ns - current.spec.sent_at_ns) // 1_000_000,
    )
    draft.put(DEPLOYMENT, scope, name, spec=current.spec, status=status)
