"""`fleetplane.proxies.v1.AgentIdentity`: the registration token exchanged for a certificate, and renewals."""

from __future__ import annotations

import structlog

from fleetplane.domains.proxies.agents import machines
from fleetplane.domains.proxies.agents.identity import ROLE, URI_AGENT
from fleetplane.domains.proxies.agents.live import AgentPresences
from fleetplane.domains.proxies.agents.machines import CERTIFICATE_DAYS, Approach, Machines
from fleetplane.domains.proxies.agents.records import AgentRoster, actor
from fleetplane.domains.proxies.agents.registry import token_digest
from fleetplane.domains.proxies.kinds.records import Agent
from fleetplane.domains.proxies.wire import check_text
from fleetplane.gen.fleetplane.proxies.v1 import identity_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition
from fleetplane.kernel.identity import Authority, IssuedCertificate, LeafProfile, LeafUsage
from fleetplane.kernel.identity.authority import URI_ROLE, PublicKey
from fleetplane.kernel.identity.enrolment import proven_key
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.sessions import SUPERSEDED
from fleetplane.rpc import CallContext, Connection

log = structlog.get_logger(__name__)


class AgentIdentityService:
    def __init__(
        self,
        *,
        roster: AgentRoster,
        machines: Machines,
        presences: AgentPresences,
        authority: Authority | None,
        revocations: Revocations | None,
        heartbeat_seconds: float,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._roster = roster
        self._machines = machines
        self._presences = presences
        self._authority = authority
        self._revocations = revocations
        self._heartbeat_seconds = heartbeat_seconds

    async def Enrol(self, request: pb.EnrolRequest, context: CallContext) -> pb.Identity:
        check_text("hostname", request.hostname)
        proven = proven_key(request.csr_pem)
        agent = self._roster.holder(request.token)
        self._require_welcome(agent, proven.digest, context.connection)
        connection = context.connection
        approach = Approach(
            hostname=request.hostname,
            address=connection.address,
            peer=machines.connection_of(connection),
            key=proven.digest,
        )
        issued = self._issue(agent, proven.key)
        found = await self._machines.bind(
            agent,
            approach,
            token_digest(request.token),
            serial=f"{issued.serial:x}",
            expires_at_ns=_ns(issued),
            holder=self._presences.holder(agent, approach, now_ns=self._clock.now_ns()),
            heartbeat_seconds=self._heartbeat_seconds,
        )
        if found is None:
            log.warning(
                "proxies.machine_refused",
                agent=agent.name,
                hostname=approach.hostname,
                address=approach.address,
            )
            await self._machines.note_contender(agent, approach)
            raise machines.contended()
        if found:  # whoever spoke for the agent with the token alone does so no more
            self._presences.disconnect(agent.name, reason=SUPERSEDED)
        log.info(
            "proxies.agent_bound", agent=agent.name, hostname=approach.hostname, address=approach.address
        )
        return _identity(agent, issued)

    async def Renew(self, request: pb.RenewRequest, context: CallContext) -> pb.Identity:
        proven = proven_key(request.csr_pem)
        agent = self._roster.find(request.agent_id)
        if agent is None:
            raise machines.replaced()
        self._machines.require_bound(agent, proven.digest)
        self._require_welcome(agent, proven.digest, context.connection)
        issued = self._issue(agent, proven.key)
        await self._machines.renewed(
            agent, proven.digest, serial=f"{issued.serial:x}", expires_at_ns=_ns(issued)
        )
        return _identity(agent, issued)

    def _require_welcome(self, agent: Agent, key: str, connection: Connection) -> None:
        if connection.transport != "tls" or self._authority is None:
            raise FailedPrecondition(
                "this listener has no TLS, so no certificate can be presented",
                hint="go on with the token",
            )
        if self._revocations is not None:
            # A certificate that was revoked by its serial takes its key with it: no other is made for that.
            binding = self._machines.binding(agent)
            held = binding.serial if binding is not None and binding.key == key else ""
            serial = int(held, 16) if held else None
            self._revocations.check(serial=serial, principal=actor(agent.name))

    def _issue(self, agent: Agent, key: PublicKey) -> IssuedCertificate:
        assert self._authority is not None
        profile = LeafProfile(
            usage=LeafUsage.CLIENT,
            common_name=f"proxy-agent-{agent.name}",
            uri=(URI_ROLE + ROLE, URI_AGENT + agent.name),
            ttl_hours=CERTIFICATE_DAYS * 24,
        )
        return self._authority.issue_leaf(key, profile)


def _ns(issued: IssuedCertificate) -> int:
    return round(issued.not_after.timestamp()) * 1_000_000_000


def _identity(agent: Agent, issued: IssuedCertificate) -> pb.Identity:
    made = pb.Identity(agent_id=agent.name, certificate_pem=issued.certificate_pem.decode())
    made.expires_at.FromSeconds(round(issued.not_after.timestamp()))
    return made
