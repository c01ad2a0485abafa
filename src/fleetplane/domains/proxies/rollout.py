"""Rollouts of a workspace's configuration: its versions, and its agents as targets.

While a rollout or a policy holds a workspace, agents serve the version at which it is held, whatever is
newest; the agents that a rollout has moved are pinned to its version. Both stand in the newest version, so
every step of a rollout makes one more, whose contents are those of the one before. A version is therefore
named by the first number under which its contents were there.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleetplane.domains.proxies.agents.ports import AgentLogQuery, AgentPresence, Deployer, ReportedRecords
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    CONFIG_VERSION,
    DEPLOYMENT,
    ID_CLAIM,
    WORKSPACE,
    Agent,
    ConfigVersionSpec,
    Deployment,
    agent_scope,
)
from fleetplane.domains.proxies.kinds.values import AgentState, DeploymentState
from fleetplane.domains.proxies.resources.places import place
from fleetplane.domains.proxies.rules import deployment
from fleetplane.domains.proxies.rules.configuration import SECTIONS, labels_of
from fleetplane.domains.proxies.serving.basis import decided_again
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.fleet.rollouts import holds
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Draft, Store

NAME = "proxies.config"
NEWEST = "newest"
ERROR_RATE, HEALTHY = "error_rate", "healthy"
OBJECTS = frozenset(
    {"virtual-host", "upstream", "proxy-stream", "access-list", "workspace-settings", "certificate"}
)
"""Resources whose changes are changes of their workspace's configuration."""
LATENCIES: Mapping[str, float] = {"latency_p50": 0.5, "latency_p95": 0.95, "latency_p99": 0.99}
LATENCY_AGENTS, LATENCY_REQUESTS = 50, 500
"""Agents that are asked, and the newest requests of each: 25,000 at most, read in a fraction of a second."""


def is_held(source: Store | Draft, scope: str) -> bool:
    """Whether new versions of a workspace wait for a rollout: it has a policy, or one is under way."""
    return holds.is_held(source, NAME, scope)


@dataclass(frozen=True, slots=True)
class _Versions:
    """The versions of one workspace that are kept."""

    specs: Mapping[int, ConfigVersionSpec]
    names: Mapping[int, int]
    """From a number to the first one under which the same contents were there."""

    @classmethod
    def of(cls, specs: Sequence[ConfigVersionSpec]) -> _Versions:
        names: dict[int, int] = {}
        for before, spec in zip((None, *specs), specs, strict=False):
            same = before is not None and _contents(before) == _contents(spec)
            names[spec.version] = names[before.version] if same and before is not None else spec.version
        return cls({spec.version: spec for spec in specs}, names)

    def served(self, number: int, agent: str) -> str:
        """Which contents an agent is sent under a number; empty if that is no longer known."""
        spec = self.specs.get(number)
        if spec is None:
            return ""
        content = spec.pins.get(agent, spec.held)
        found = self.names.get(number if content is None else content)
        return "" if found is None else str(found)


def _contents(spec: ConfigVersionSpec) -> tuple[object, ...]:
    return *(getattr(spec, section) for section in SECTIONS), spec.settings


class WorkspaceConfiguration:
    """The subject `proxies.config`."""

    name = NAME
    domain = "proxies"
    summary = "configuration of a workspace; confirmed when an agent saw its NGINX answer with it"
    measures: Mapping[str, str] = {
        ERROR_RATE: "share of answers with a 5xx status, from 0 to 1",
        HEALTHY: "share of agents that are online and not degraded, from 0 to 1",
        **{
            name: f"milliseconds within which {share:.0%} of requests were answered, of the newest in the log"
            for name, share in LATENCIES.items()
        },
    }
    watches: Sequence[AnyKind] = (AGENT, DEPLOYMENT)
    versions: Sequence[AnyKind] = (CONFIG_VERSION,)

    def __init__(
        self,
        store: Store,
        workspaces: Workspaces,
        *,
        presence: AgentPresence,
        deployer: Deployer,
        records: ReportedRecords,
    ) -> None:
        self._store = store
        self._workspaces = workspaces
        self._presence = presence
        self._deployer = deployer
        self._records = records
        self._known: dict[str, tuple[int, _Versions]] = {}
        """By scope, with the number of the newest: versions never change."""

    def __repr__(self) -> str:
        return f"<WorkspaceConfiguration {len(self._known)}>"

    # Names.

    def scope(self, text: str) -> str:
        """A workspace by its scope or its id."""
        if self._store.get(WORKSPACE, text, text.rpartition("/")[2]) is not None:
            return text
        found = self._store.claimed_by(WORKSPACE, "", ID_CLAIM, text)
        if found is None:
            raise NotFound(
                f"there is no workspace {text[:200]!r}", hint="write its id, or org/ORGANIZATION/ws/WORKSPACE"
            )
        return found

    def scopes(self, below: str) -> Sequence[str]:
        return [workspace.scope for workspace in self._store.list(WORKSPACE, below)]

    def version(self, scope: str, text: str) -> str:
        if text == NEWEST:
            return self.newest(scope)
        if not (text.isascii() and text.isdecimal() and len(text) <= 12):
            raise InvalidArgument(f"{text[:40]!r} is not a version; write its number, or newest", field="to")
        found = self._versions(scope).names.get(int(text))
        if found is None:
            raise NotFound(f"version {int(text)} is not kept")
        return str(found)

    def newest(self, scope: str) -> str:
        found = self._workspaces.newest(scope)
        return "" if found is None else str(self._versions(scope).names[found.version])

    def waiting(self, scope: str) -> str:
        found = self._workspaces.newest(scope)
        if found is None or found.held is None:
            return ""
        names = self._versions(scope).names
        newest = names[found.version]
        return "" if names.get(found.held) == newest else str(newest)

    def _versions(self, scope: str) -> _Versions:
        stored = self._store.list(CONFIG_VERSION, scope)
        newest = stored[-1].spec.version if stored else 0
        known = self._known.get(scope)
        if known is None or known[0] != newest:
            known = self._known[scope] = newest, _Versions.of([one.spec for one in stored])
        return known[1]

    def holder(self, kind: str, scope: str, _name: str) -> str | None:
        """The workspace of an object of the resource API, if that is part of its configuration."""
        if kind not in OBJECTS:
            return None
        workspaces = self._store.list(WORKSPACE)
        return next((one.scope for one in workspaces if place(one, self._store) == scope), None)

    # Targets.

    def targets(self, scope: str) -> Mapping[str, TargetFact]:
        """Every agent of a workspace but those that people pinned, in the order of their names."""
        versions = self._versions(scope)
        agents = sorted(self._store.list(AGENT, scope), key=lambda agent: (agent.spec.name, agent.name))
        return {
            agent.name: self._fact(agent, versions) for agent in agents if agent.spec.pinned_version is None
        }

    def _fact(self, agent: Agent, versions: _Versions) -> TargetFact:
        sent = self._store.list(DEPLOYMENT, agent_scope(agent.scope, agent.name))
        done = next((one for one in reversed(sent) if _state(one) is DeploymentState.SUCCESS), None)
        error, error_at_ns = _refusal(sent[-1]) if sent else ("", 0)
        status = agent.status
        return TargetFact(
            version=versions.served(done.spec.version, agent.name) if done is not None else "",
            online=self._presence.is_present(agent.name),
            healthy=status is not None and status.state is AgentState.ONLINE,
            labels=labels_of(agent),
            error=error,
            error_at_ns=error_at_ns,
            error_version=versions.served(sent[-1].spec.version, agent.name) if sent else "",
            title=agent.spec.name,
        )

    # Moving.

    def default(self, scope: str) -> str:
        found = self._workspaces.newest(scope)
        if found is None:
            return ""
        return str(self._versions(scope).names[found.version if found.held is None else found.held])

    @decided_again
    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            plan = self._workspaces.plan(scope, cause="rollout.step", subject=rollout, actor=ACTOR)
            following = plan.next
            if default and self._workspaces.version(scope, int(default)) is not None:
                following.held = int(default)
            pins = dict(following.pins)
            pinned = self._workspaces.pinned_by_operators(scope)
            held = "" if following.held is None else self.version(scope, str(following.held))
            for agent, version in versions.items():
                if agent in pinned:
                    continue
                if version in ("", held):
                    pins.pop(agent, None)
                elif self._store.get(AGENT, scope, agent) is not None:
                    pins[agent] = int(version)
            following.pins = pins
            await self._workspaces.commit(scope, plan)

    async def again(self, scope: str, targets: Collection[str]) -> None:
        for name in targets:
            agent = self._store.get(AGENT, scope, name)
            if agent is not None:
                await self._deployer.retried(agent)

    @decided_again
    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:
        async with self._workspaces.editing(scope):
            self._workspaces.require(scope)
            plan = self._workspaces.plan(scope, cause="rollout.done", subject=rollout, actor=ACTOR)
            following = plan.next
            following.pins = self._workspaces.pinned_by_operators(scope)
            following.held = None if not held and self.newest(scope) == version else int(version)
            await self._workspaces.commit(scope, plan)

    # Gates.

    async def measure(self, scope: str, query: str, targets: Collection[str], period: Period) -> float | None:
        if not targets:
            return None
        if query == HEALTHY:
            agents = (self._store.get(AGENT, scope, name) for name in targets)
            good = sum(one is not None and _is_healthy(one) for one in agents)
            return good / len(targets)
        if query in LATENCIES:
            return percentile(await self._latencies(scope, targets, period), LATENCIES[query])
        found = await self._records.traffic(scope, targets, from_ns=period.from_ns, to_ns=period.to_ns)
        return found.error_rate if found.requests_total else None

    async def _latencies(self, scope: str, targets: Collection[str], period: Period) -> list[float]:
        """Of the newest requests of some of the agents, in milliseconds."""
        found: list[float] = []
        for agent in sorted(targets)[:LATENCY_AGENTS]:
            query = AgentLogQuery(
                from_ns=period.from_ns, to_ns=period.to_ns, limit=LATENCY_REQUESTS, agent_id=agent
            )
            page = await self._records.access_log(scope, query)
            found += [entry.response_time_ms for entry in page.entries]
        return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """The least value that at least this share of them does not exceed; None without any."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _is_healthy(agent: Agent) -> bool:
    return agent.status is not None and agent.status.state is AgentState.ONLINE


def _state(found: Deployment) -> DeploymentState | None:
    return found.status.state if found.status is not None else None


def _refusal(last: Deployment) -> tuple[str, int]:
    """Why an agent did not take what it was last sent, and when it said so; what passes by itself is none."""
    status = last.status
    if status is None or status.state not in (DeploymentState.FAILED, DeploymentState.ROLLED_BACK):
        return "", 0
    if status.error == deployment.TIMED_OUT or deployment.is_passing(status.error):
        return "", 0
    return status.error or f"the agent ended it as {status.state}", status.changed_at_ns
