"""`fleetplane.instances.v1.AgentRenewal`: a new certificate for an agent whose present one grows old.

Who asks is read from the certificate that the connection was made with; the request says only
for which key the next one shall be. That the instance still exists, that it is not being deleted
and what it was issued are one transaction. While the authority is being replaced, agents learn
here of the next one, and that they should renew before their time.
"""

from __future__ import annotations

import msgspec

from fleetplane.domains.instances import credentials
from fleetplane.domains.instances.credentials import ClientRole
from fleetplane.domains.instances.kinds import InstanceStatus
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.gen.fleetplane.instances.v1 import renewal_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound, PermissionDenied
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.rpc import CallContext


class RenewalService:
    def __init__(self, instances: Instances, groups: Groups, authority: Authority, clock: Clock) -> None:
        self._instances = instances
        self._groups = groups
        self._authority = authority
        self._clock = clock

    async def RenewCertificate(
        self, request: renewal_pb2.RenewCertificateRequest, context: CallContext
    ) -> renewal_pb2.RenewCertificateResponse:
        tenant, name = credentials.client_of(context.principal)
        key = credentials.load_public_key(request.public_key_pem, field="public_key_pem")
        wanted = credentials.key_digest(key)
        presented = peer_identity(context.connection.certificates).public_key_digest
        issued = credentials.issue(
            self._authority,
            key,
            role=ClientRole.AGENT,
            tenant=tenant,
            client=name,
            life_hours=self._groups.certificate_hours(ClientRole.AGENT),
            serial=self._clock.now_ns(),
        )

        def renewed(status: InstanceStatus, _now_ns: int) -> InstanceStatus:
            check(status, presented=presented, wanted=wanted)
            return msgspec.structs.replace(
                status,
                key_digest=wanted,
                certificate_serial=str(issued.serial),
                certificate_expires_at_ns=round(issued.not_after.timestamp() * 1e9),
                certificate_authority=issued.issuer_key_id,
            )

        done = await self._instances.step(tenant, name, renewed, action="renew", actor=context.principal.name)
        if done is None:
            raise NotFound(f"instance {name!r} is not known any more", details={"instance_id": name})
        answer = renewal_pb2.RenewCertificateResponse(
            client_certificate_pem=issued.leaf_pem, authority_pem=self._authority.trust_pem
        )
        answer.expires_at.FromDatetime(issued.not_after)
        return answer

    async def GetTrust(
        self, request: renewal_pb2.GetTrustRequest, context: CallContext
    ) -> renewal_pb2.GetTrustResponse:
        tenant, name = credentials.client_of(context.principal)
        instance = self._instances.get(tenant, name)
        pem, trust = self._authority.trust_pem, self._authority.trust_id
        status = instance.status or InstanceStatus()
        if request.holding == digest(pem) and status.trust != trust:
            await self._instances.step(
                tenant,
                name,
                lambda status, _now_ns: msgspec.structs.replace(status, trust=trust),
                action="trust",
                actor=context.principal.name,
            )
        presented = peer_identity(context.connection.certificates).issuer_key_id
        return renewal_pb2.GetTrustResponse(authority_pem=pem, renew=presented != self._authority.key_id)


def check(status: InstanceStatus, *, presented: str, wanted: str) -> None:
    """Whether an instance may have another certificate. Both keys are given as their digests.

    A key that was replaced renews nothing any more, however long its last certificate runs; but
    whoever replaced it and lost the answer still has only the old one, and asks for the same new
    one again.
    """
    if status.deleting_at_ns is not None or status.deleted_at_ns is not None:
        raise FailedPrecondition("the instance is being deleted")
    if status.key_digest not in ("", presented, wanted):
        raise PermissionDenied(
            "another key has taken the place of the one that was presented", details={"cause": "replaced"}
        )
