"""Agents' certificates and tokens: who an agent is, on its stream and when it asks for a release.

A certificate alone lets nobody in. Its key must be the one that its agent is bound to (`machines`), so a
change of machine or a new token revokes every certificate before it, without a list of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from fleetplane.domains.proxies.agents.machines import Machines
from fleetplane.domains.proxies.agents.records import AgentRoster, actor
from fleetplane.domains.proxies.kinds.records import (
    Agent,
)
from fleetplane.domains.proxies.rules.configuration import labels_of
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import Authority, peer_identity
from fleetplane.kernel.identity.authority import URI_ROLE
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.rpc import Authentication, CallContext, Connection, Needs, Rate

LISTENER = "proxy-agents"
REPORT = Permission("proxies.report")
STREAM_RATE = Rate(per_second=100.0, burst=4096)
"""Per address: a fleet that comes back behind one address must get in, a guesser must not get far."""


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


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.TOKEN,
    permission=REPORT,
    rate=STREAM_RATE,
    register=lambda _domain, store: ProxyRegister(AgentRoster(store)),
    needs=Needs.WRITES,
)


ROLE = "proxies.agent"
URI_AGENT = "fleetplane://proxies/agent/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """Who presents a certificate of ours."""

    agent: Agent
    key: str
    serial: int


class AgentAuthenticator:
    """Recognises agents by the certificates that they present."""

    def __init__(
        self,
        *,
        roster: AgentRoster,
        machines: Machines,
        authority: Authority | None,
        revocations: Revocations | None,
        clock: Clock,
    ) -> None:
        self._roster = roster
        self._machines = machines
        self._authority = authority
        self._revocations = revocations
        self._clock = clock

    def certified(self, connection: Connection) -> Certified | None:
        """None without a certificate; raises for one that is not, or no longer, an agent's."""
        if not connection.certificates or self._authority is None:
            return None
        identity = peer_identity(connection.certificates)
        if not self._authority.accepts(identity.issuer_key_id):
            raise Unauthenticated("the authority of this certificate is trusted no more")
        if identity.not_after <= datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC):
            raise Unauthenticated("the certificate has expired", details={"cause": "expired"})
        named = [uri.removeprefix(URI_AGENT) for uri in identity.uris if uri.startswith(URI_AGENT)]
        if len(named) != 1 or URI_ROLE + ROLE not in identity.uris:
            raise PermissionDenied("the certificate is not one for NGINX agents", details={"cause": "role"})
        agent = self._roster.find(named[0])
        if agent is None:
            raise Unauthenticated("the agent was deleted")
        if self._revocations is not None:
            self._revocations.check(serial=identity.serial, principal=actor(agent.name))
        self._machines.require_bound(agent, identity.public_key_digest)
        return Certified(agent=agent, key=identity.public_key_digest, serial=identity.serial)
