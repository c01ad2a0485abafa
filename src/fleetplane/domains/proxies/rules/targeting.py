"""Whether agents are named as they can be. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.domains.proxies.kinds.values import NamedAgents, SelectedAgents, TargetAgents
from fleetplane.domains.proxies.rules.conflicts import WorkspaceSurroundings
from fleetplane.fleet import selectors
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.rest.problems import Code, Problem

AGENT_IDS_LIMIT = 1000


def target_problems(target: TargetAgents, around: WorkspaceSurroundings) -> Iterator[Problem]:
    """Agents that cannot be meant, by field."""
    match target:
        case SelectedAgents(label_selector=text):
            try:
                selectors.parse(text)
            except InvalidArgument as error:
                yield Problem(field="target_agents.label_selector", message=error.message)
        case NamedAgents(agent_ids=ids):
            if not 0 < len(ids) <= AGENT_IDS_LIMIT:
                yield Problem(
                    field="target_agents.agent_ids",
                    message=f"Must name 1 to {AGENT_IDS_LIMIT} agents",
                    code=Code.TOO_MANY if ids else Code.REQUIRED,
                )
            for index, agent in enumerate(ids):
                if agent not in around.agents:
                    yield Problem(
                        field=f"target_agents.agent_ids.{index}",
                        message="There is no such agent in this workspace",
                        code=Code.UNKNOWN_REFERENCE,
                    )
