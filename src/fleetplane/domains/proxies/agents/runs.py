"""The runs of proxies: commands to the NGINX of many agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TypeAlias

import msgspec

from fleetplane.domains.proxies import wire
from fleetplane.domains.proxies.agents.commands import ANSWER_SECONDS, REPEATABLE, STOP_SLACK_SECONDS
from fleetplane.domains.proxies.agents.ports import AgentOrder, AgentVerb
from fleetplane.domains.proxies.kinds.records import AGENT, Agent
from fleetplane.domains.proxies.nginx.site import VALIDATES_TYPED
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.fleet.runs import records
from fleetplane.fleet.runs.channel import CommandIssue, RunChannel, RunOrder
from fleetplane.fleet.runs.records import RunKind, RunSpec, RunStatus
from fleetplane.fleet.runs.runs import Runs
from fleetplane.fleet.runs.targets import RunTarget, Skipped, TargetCandidate, choose
from fleetplane.fleet.selectors import Facts, facts_of
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.commands import Commands
from fleetplane.kernel.resources import Kind
from fleetplane.kernel.store import Store


class ProxyCommand(StrEnum):
    """What can be run on many agents."""

    RELOAD = "reload"
    RESTART = "restart"
    STOP = "stop"
    STATUS = "status"
    TEST = "test"
    """Test what the agent serves, without applying anything."""


VERBS = {
    ProxyCommand.RELOAD: AgentVerb.RELOAD,
    ProxyCommand.RESTART: AgentVerb.RESTART,
    ProxyCommand.STOP: AgentVerb.STOP,
    ProxyCommand.STATUS: AgentVerb.STATUS,
    ProxyCommand.TEST: AgentVerb.VALIDATE,
}


class ProxyCall(msgspec.Struct, frozen=True, kw_only=True):
    """A command with the options of its verb."""

    command: ProxyCommand
    force: bool = False
    graceful: bool = True
    timeout_seconds: int = 30

    @property
    def answer_seconds(self) -> float:
        """How long to wait for an agent's answer, unless the request sets another time."""
        return ANSWER_SECONDS.get(VERBS[self.command], self.timeout_seconds + STOP_SLACK_SECONDS)

    @property
    def arguments(self) -> Sequence[str]:
        """Its options, as people write them."""
        found = []
        if self.command is ProxyCommand.RESTART and self.force:
            found.append("--force")
        if self.command is ProxyCommand.STOP:
            found += [] if self.graceful else ["--now"]
            found.append(f"--within={self.timeout_seconds}s")
        return tuple(found)


class ProxyRunSpec(RunSpec, frozen=True):
    """As it is stored: no field may be renamed."""

    target: RunTarget
    call: ProxyCall


PROXY_RUN: RunKind[ProxyRunSpec] = Kind("proxy-run", ProxyRunSpec, RunStatus)

ProxyRun: TypeAlias = records.Run[ProxyRunSpec]
ProxyOrder: TypeAlias = RunOrder[RunTarget, ProxyCall]
ProxyRuns: TypeAlias = Runs[ProxyRunSpec, RunTarget, ProxyCall]


def facts(agent: Agent) -> Facts:
    """What an agent is selected by: its labels, `id`, `name` and `state`."""
    state = agent.status.state if agent.status is not None else ""
    return facts_of(labels_of(agent), {"id": agent.name, "name": agent.spec.name, "state": state})


@dataclass(slots=True, kw_only=True)
class _Fleet:
    """The agents of one workspace."""

    ids: dict[str, str]
    facts: dict[str, Callable[[], Facts]]


class ProxyChannel(RunChannel[ProxyRunSpec, RunTarget, ProxyCall]):
    domain = "proxies"
    kind = PROXY_RUN
    nobody = "the agents that are meant are not connected, or there are none"

    def __init__(self, store: Store, *, ledger: Commands, is_present: Callable[[str], bool]) -> None:
        self._store = store
        self._is_present = is_present
        self.ledger = ledger

    def candidates(
        self, scope: str, target: RunTarget
    ) -> tuple[Sequence[TargetCandidate], Sequence[Skipped]]:
        fleet = self._fleet(scope)
        named = tuple(name if name in fleet.facts else fleet.ids.get(name, name) for name in target.names)
        chosen, missing = choose(msgspec.structs.replace(target, names=named), fleet.facts)
        return [TargetCandidate(name=name) for name in chosen], missing

    def _fleet(self, scope: str) -> _Fleet:
        """The agents of this workspace; an agent of another workspace is reported as unknown."""
        agents = sorted(self._store.list(AGENT, scope), key=lambda agent: (agent.spec.name, agent.name))
        return _Fleet(
            ids={agent.spec.name: agent.name for agent in agents},
            facts={agent.name: partial(facts, agent) for agent in agents},
        )

    def tenant(self, scope: str) -> str:
        """The organisation: it may have many workspaces."""
        return scope.partition("/ws/")[0]

    def is_present(self, name: str) -> bool:
        return self._is_present(name)

    def is_able(self, order: ProxyOrder, name: str) -> bool:
        """Agents that cannot test what they serve would test an empty text instead."""
        if order.call.command is not ProxyCommand.TEST:
            return True
        agent = self._store.get(AGENT, order.scope, name)
        known = agent.status.capabilities if agent is not None and agent.status is not None else ()
        return VALIDATES_TYPED in known

    def issue(self, order: ProxyOrder) -> CommandIssue:
        verb = VERBS[order.call.command]
        return CommandIssue(
            verb=verb,
            payload=_command(order.call).SerializeToString(),
            run_for_seconds=order.policy.deadline_seconds,
            # Also where absent agents are waited for: a restart that may have happened is not sent again.
            repeatable=verb in REPEATABLE,
        )

    def spec(self, order: ProxyOrder, common: RunSpec) -> ProxyRunSpec:
        return ProxyRunSpec(**msgspec.structs.asdict(common), target=order.target, call=order.call)


def _command(call: ProxyCall) -> pb.Command:
    if call.command is ProxyCommand.TEST:
        # Nothing beside what is served: that alone is tested.
        return pb.Command(validate_config=pb.ValidateConfigCommand(candidate=pb.ConfigUpdate()))
    order = AgentOrder(
        verb=VERBS[call.command],
        force=call.force,
        graceful=call.graceful,
        timeout_seconds=call.timeout_seconds,
    )
    return wire.command(order)
