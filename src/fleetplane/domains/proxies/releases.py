"""Who asks for releases of the proxies' agent: an agent, by its certificate or token."""

from __future__ import annotations

from typing import Any

from fleetplane.domains.proxies.agents.assembly import LISTENER, REPORT, STREAM_RATE
from fleetplane.domains.proxies.agents.records import AgentRoster, actor
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, Needs


class ProxyRegister:
    def __init__(self, roster: AgentRoster) -> None:
        self._roster = roster

    def recognise(self, context: CallContext, name: str) -> str:  # noqa: ARG002  # its credential says it
        """The agent that the connection or its token belongs to."""
        return context.principal.name.removeprefix(actor(""))

    def card(self, agent: str) -> AgentCard | None:
        """An agent by its id."""
        found = self._roster.find(agent)
        return AgentCard(title=found.spec.name, labels=labels_of(found)) if found is not None else None


def _register(_domain: Any, store: Store) -> ProxyRegister:
    return ProxyRegister(AgentRoster(store))


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.TOKEN,
    permission=REPORT,
    rate=STREAM_RATE,
    register=_register,
    needs=Needs.WRITES,
)
