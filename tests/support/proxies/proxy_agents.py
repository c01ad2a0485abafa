"""Records of agents, for tests that need one and no server."""

from __future__ import annotations

from fleetplane.domains.proxies.kinds.records import AGENT, Agent, AgentSpec


def reporting_agent(scope: str, name: str) -> Agent:
    return Agent(
        kind=AGENT.name,
        scope=scope,
        name=name,
        uid=name,
        labels={},
        spec=AgentSpec(name=name),
        status=None,
        conditions=(),
        revision=1,
        created_revision=1,
        generation=1,
        created_at_ns=0,
        updated_at_ns=0,
    )
