"""Why an agent is degraded or away, a virtual host not live, and a certificate not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from fleetplane.domains.proxies.access import Access, ProxyCaller
from fleetplane.domains.proxies.acme.controller import CertificateController
from fleetplane.domains.proxies.agents.controller import AgentController
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    CERTIFICATE,
    DEPLOYMENT,
    ID_CLAIM,
    VIRTUAL_HOST,
    Agent,
    ConfigVersionSpec,
    VirtualHost,
    agent_scope,
    version_name,
)
from fleetplane.domains.proxies.kinds.values import AgentState, CertificateState, DeploymentState
from fleetplane.domains.proxies.rest.common import Gatekeeper
from fleetplane.domains.proxies.rules.configuration import placed_otherwise
from fleetplane.domains.proxies.rules.conflicts import targets
from fleetplane.domains.proxies.rules.deployment import host_error
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.explain import from_pass, from_record, placed
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.reconcile import Reason
from fleetplane.kernel.reconcile.explanation import Finding
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.web.rest.routes import Headers

AGENTS_SHOWN = 20
"""Agents named in one answer about a host; an operator who mends these asks again."""
HOSTS_SHOWN = 10
"""Hosts named in one sentence about an agent."""
_GOOD = frozenset({CertificateState.ACTIVE})


class ProxyReaders:
    """Members of the organisation that a thing belongs to. To strangers nothing is there."""

    def __init__(self, gatekeeper: Gatekeeper, access: Access) -> None:
        self._gatekeeper = gatekeeper
        self._access = access

    def authenticate(self, headers: Headers) -> ProxyCaller:
        return self._gatekeeper.authenticate(headers)

    def within(self, _caller: ProxyCaller, _permission: Permission, asked: str) -> str:
        return asked  # what is found there is shown to members only

    def may(self, caller: ProxyCaller, permission: Permission, scope: str) -> bool:
        return self._access.may(caller, permission, scope)


class AgentExplainer:
    """By its id."""

    def __init__(
        self, store: Store, controller: AgentController, workspaces: Workspaces, clock: Clock
    ) -> None:
        self._store = store
        self._controller = controller
        self._workspaces = workspaces
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        scope = _located(self._store, AGENT, name)
        return placed("agent", name, None if scope is None else agent_scope(scope, name), within)

    def explain(self, _scope: str, name: str) -> Sequence[Finding]:
        workspace = _located(self._store, AGENT, name)
        agent = self._store.get(AGENT, workspace, name) if workspace is not None else None
        if agent is None:
            return ()
        reasons = (*_agent_reasons(agent), *_ignored(agent, self._workspaces.placed_otherwise(agent)))
        record = from_record(self._clock, name, reasons)
        return (*record, *from_pass(self._controller.reconciler.name, self._controller.explain(name)))


def _agent_reasons(agent: Agent) -> Iterator[Reason]:
    status = agent.status
    if status is None:
        yield Reason(code="NEVER_REGISTERED", message="no machine has registered with its token yet")
        return
    if status.state is not AgentState.ONLINE:
        for words in status.reasons or ("no reason was noted",):
            yield Reason(code=status.state.value.upper(), message=words)


def _ignored(agent: Agent, names: Sequence[str]) -> Iterator[Reason]:
    """That labels which only the agent reports do not place these hosts."""
    if names:
        more = f" and {len(names) - HOSTS_SHOWN} more" if len(names) > HOSTS_SHOWN else ""
        shown = ", ".join(names[:HOSTS_SHOWN]) + more
        yield Reason(
            code="REPORTED_LABELS",
            message=f"labels that only the agent {agent.spec.name!r} reports do not place {shown}; "
            f"set them as an operator: PATCH /agents/{agent.name}",
            subject=f"agent/{agent.name}",
        )


class HostExplainer:
    """By its id: at which agents it is not in service, and why."""

    def __init__(self, store: Store, workspaces: Workspaces, clock: Clock) -> None:
        self._store = store
        self._workspaces = workspaces
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        return placed("host", name, _located(self._store, VIRTUAL_HOST, name), within)

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        return from_record(self._clock, name, tuple(self._reasons(scope, name)))

    def _reasons(self, scope: str, name: str) -> Iterator[Reason]:
        newest = self._workspaces.newest(scope)
        host = self._store.get(VIRTUAL_HOST, scope, name)
        if newest is None or host is None or name not in newest.virtual_hosts:
            yield Reason(code="NOT_IN_VERSION", message="no version of the workspace has it")
            return
        agents = [
            agent
            for agent in self._store.list(AGENT, scope)
            if targets(host.spec.target_agents, agent.name, agent.spec.labels)
        ]
        ignored = (
            reason
            for agent in self._store.list(AGENT, scope)
            for reason in _ignored(agent, placed_otherwise(agent, (host.spec,)))
        )
        yield from islice(ignored, AGENTS_SHOWN)
        if not agents:
            yield Reason(code="NO_AGENT", message="its target selects none of the workspace's agents")
            return
        whole = self._for_all(agents, newest, host)
        if whole is not None:
            yield whole
            return
        told = (self._at(agent, newest, name) for agent in agents)
        yield from islice(filter(None, told), AGENTS_SHOWN)

    def _for_all(
        self, agents: Sequence[Agent], newest: ConfigVersionSpec, host: VirtualHost
    ) -> Reason | None:
        """What keeps it from every agent. Looked at for one: a share takes as long as there are hosts."""
        free = next((agent for agent in agents if agent.name not in newest.pins), None)
        if free is None or newest.held is not None:
            return None
        share = self._workspaces.share(free, newest)
        if words := share.refused.get(f"virtual_host/{host.name}", ""):
            return Reason(code="REFUSED", message=words)
        if host.name in share.withheld:
            return Reason(
                code="NO_CERTIFICATE",
                message="it waits for its certificate to be issued",
                subject=f"certificate/{host.spec.ssl_certificate_id}",
            )
        return None

    def _at(self, agent: Agent, newest: ConfigVersionSpec, host: str) -> Reason | None:
        """Why an agent that is to serve a host as it is now does not, or None if it does."""
        found = self._obstacle(agent, newest, host)
        if found is None:
            return None
        return Reason(code=found.code, message=found.message, subject=f"agent/{agent.name}")

    def _obstacle(self, agent: Agent, newest: ConfigVersionSpec, host: str) -> Reason | None:
        version, pinned = newest.version, newest.pins.get(agent.name, newest.held)
        if pinned is not None:
            content = self._workspaces.version(agent.scope, pinned)
            if content is None or content.virtual_hosts.get(host) != newest.virtual_hosts[host]:
                if agent.spec.pinned_version is None:
                    message = f"a rollout holds agent {agent.spec.name!r} at version {pinned}"
                    return Reason(code="ROLLOUT", message=message)
                return Reason(
                    code="PINNED", message=f"agent {agent.spec.name!r} is rolled back to version {pinned}"
                )
        if agent.status is None or agent.status.state is AgentState.OFFLINE:
            return Reason(code="AGENT_AWAY", message=f"agent {agent.spec.name!r} is not connected")
        place = agent_scope(agent.scope, agent.name)
        deployment = self._store.get(DEPLOYMENT, place, version_name(version))
        if deployment is None or deployment.status is None:
            return Reason(
                code="NOT_SENT", message=f"version {version} was not sent to {agent.spec.name!r} yet"
            )
        status = deployment.status
        if words := host_error(status, host):
            return Reason(code="SET_ASIDE", message=f"{agent.spec.name!r} set it aside: {words}")
        if status.state is DeploymentState.SUCCESS:
            return None
        error = f": {status.error}" if status.error else ""
        return Reason(
            code=status.state.value.upper(),
            message=f"version {version} is {status.state.value} at {agent.spec.name!r}{error}",
        )


class CertificateExplainer:
    """By its id."""

    def __init__(self, store: Store, controller: CertificateController, clock: Clock) -> None:
        self._store = store
        self._controller = controller
        self._clock = clock

    def locate(self, within: str, name: str) -> str:
        return placed("certificate", name, _located(self._store, CERTIFICATE, name), within)

    def explain(self, scope: str, name: str) -> Sequence[Finding]:
        certificate = self._store.get(CERTIFICATE, scope, name)
        if certificate is None or certificate.status is None:
            return ()
        status, reasons = certificate.status, []
        if status.state not in _GOOD:
            words = status.error or f"it is {status.state.value}"
            reasons.append(Reason(code=status.state.value.upper(), message=words))
        if status.alarm:
            reasons.append(Reason(code="EXPIRY", message=f"the time left is {status.alarm}"))
        passed = from_pass(self._controller.reconciler.name, self._controller.reconciler.explain(name))
        return (*from_record(self._clock, name, reasons), *passed)


def _located(store: Store, kind: AnyKind, name: str) -> str | None:
    return store.claimed_by(kind, "", ID_CLAIM, name)
