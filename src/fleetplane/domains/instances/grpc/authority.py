"""`fleetplane.admin.v1.AuthorityAdmin`: replacing the authority, and the key that nonces are signed with.

The steps and their order are the kernel's; here it is known who would be left behind by one.
"""

from __future__ import annotations

import structlog

from fleetplane.domains.instances.kinds import OPERATOR
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.rules import trust
from fleetplane.domains.instances.rules.trust import Census
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.roots import SuccessionPhase
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

log = structlog.get_logger(__name__)

_OTHER_ROLE = {SuccessionPhase.ANNOUNCED: "announced", SuccessionPhase.SWITCHED: "retiring"}


class AuthorityService:
    def __init__(
        self, store: Store, authority: Authority, workloads: Authority, nonces: SigningKeys, clock: Clock
    ) -> None:
        """`workloads` is replaced in the same steps as `authority`."""
        self._store = store
        self._instances = Instances(store)
        self._authority = authority
        self._workloads = workloads
        self._nonces = nonces
        self._clock = clock

    async def GetAuthorities(
        self, _request: authority_pb2.GetAuthoritiesRequest, _context: CallContext
    ) -> authority_pb2.Authorities:
        return self._answer()

    async def AnnounceAuthority(
        self, _request: authority_pb2.AnnounceAuthorityRequest, context: CallContext
    ) -> authority_pb2.Authorities:
        await self._authority.announce(actor=context.principal.name)
        await self._follow(context.principal.name)
        return self._stepped(context)

    async def ImportAuthority(
        self, request: authority_pb2.ImportAuthorityRequest, context: CallContext
    ) -> authority_pb2.Authorities:
        actor = context.principal.name
        workload = request.workload_certificate_pem, request.workload_key_pem
        if any(workload):  # checked before anything is done
            self._workloads.check(*workload)
        await self._authority.adopt(request.certificate_pem, request.key_pem, actor=actor)
        if any(workload) and self._workloads.phase is SuccessionPhase.STEADY:
            await self._workloads.adopt(*workload, actor=actor)
        await self._follow(actor)
        return self._stepped(context)

    async def ExportAuthority(
        self, _request: authority_pb2.ExportAuthorityRequest, context: CallContext
    ) -> authority_pb2.ExportAuthorityResponse:
        actor = context.principal.name
        log.warning("instances.authority_exported", actor=actor)
        return authority_pb2.ExportAuthorityResponse(
            fleet_pem=await self._authority.export(actor=actor),
            workload_pem=await self._workloads.export(actor=actor),
        )

    async def SwitchAuthority(
        self, request: authority_pb2.SwitchAuthorityRequest, context: CallContext
    ) -> authority_pb2.Authorities:
        if not request.force and self._authority.phase is SuccessionPhase.ANNOUNCED:
            trust.check_switch(self._authority, self._census())
        await self._authority.switch(actor=context.principal.name)
        await self._follow(context.principal.name)
        return self._stepped(context)

    async def RetireAuthority(
        self, request: authority_pb2.RetireAuthorityRequest, context: CallContext
    ) -> authority_pb2.Authorities:
        if not request.force:
            trust.check_retire(self._authority, self._census())
        await self._authority.retire(actor=context.principal.name)
        await self._follow(context.principal.name)
        return self._stepped(context)

    async def RotateNonceKey(
        self, _request: authority_pb2.RotateNonceKeyRequest, context: CallContext
    ) -> authority_pb2.RotateNonceKeyResponse:
        key_id = await self._nonces.rotate(actor=context.principal.name)
        log.warning("instances.nonce_key_rotated", key=key_id, actor=context.principal.name)
        return authority_pb2.RotateNonceKeyResponse(key_id=key_id)

    async def _follow(self, actor: str) -> None:
        """Bring the authority of workloads to the same step, from whichever it is at.

        It may lag: a server that was killed between the two, or one that had no such authority before.
        """
        workloads, phase = self._workloads, self._authority.phase
        while workloads.phase is not phase:
            match workloads.phase:
                case SuccessionPhase.STEADY:
                    await workloads.announce(actor=actor)
                case SuccessionPhase.ANNOUNCED:
                    await workloads.switch(actor=actor)
                case SuccessionPhase.SWITCHED:
                    await workloads.retire(actor=actor)

    def _stepped(self, context: CallContext) -> authority_pb2.Authorities:
        phase = self._authority.phase
        log.warning("instances.authority", phase=phase.value, actor=context.principal.name)
        return self._answer()

    def _census(self) -> Census:
        operators = (found.spec for found in self._store.list(OPERATOR))
        return trust.census(self._authority, self._instances.all(), operators, now_ns=self._clock.now_ns())

    def _answer(self) -> authority_pb2.Authorities:
        authority, found = self._authority, self._census()
        answer = authority_pb2.Authorities(
            phase=authority.phase,
            trust_pem=authority.trust_pem,
            unaware_instances=found.unaware,
            trusted_since=timestamp(authority.trusted_since_ns or None),
            vouches=authority.vouches,
            workload_pem=self._workloads.trust_pem,
        )
        for member in authority.members:
            entry = answer.authorities.add(
                key_id=member.key_id,
                subject=member.certificate.subject.rfc4514_string(),
                role="signing" if member.signs else _OTHER_ROLE[authority.phase],
                instances=found.instances[member.key_id],
                operators=found.operators[member.key_id],
            )
            entry.not_after.FromDatetime(member.certificate.not_valid_after_utc)
        return answer
