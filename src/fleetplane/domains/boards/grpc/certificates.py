"""The methods of `pi_controller.PiControllerService` about certificates, over the kernel's authority.

The authority is made when a server starts for the first time, and keeps its key to itself. Nobody is
given a private key: IssueCertificate, whose request has no room for a public one, says what to call
instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from fleetplane.domains.boards.access import ADMIN
from fleetplane.domains.boards.ca import rules as ca_rules
from fleetplane.domains.boards.ca.issued import IssuedCertificates
from fleetplane.domains.boards.ca.requests import RETENTION_SECONDS, CertificateRequests
from fleetplane.domains.boards.ca.rules import IssuedState, RequestState, request_status
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import CERTIFICATE, Certificate, number_of
from fleetplane.domains.boards.wire import certificates as ca_wire
from fleetplane.domains.boards.wire.message_json import page_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS
from fleetplane.rpc import CallContext

DAY_NS: Final = 86_400 * NS
PEM_LIMIT_BYTES: Final = 64 * 1024
SERIAL_LIMIT: Final = 64
RENEWED_PEM: Final = "fleetplane-certificate-bin"
"""The trailing metadata field that carries a renewed certificate to its holder."""


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class CertificateMethods:
    store: Store
    authority: Authority
    revocations: Revocations
    certificates: IssuedCertificates
    requests: CertificateRequests
    clock: Clock

    # The authority.

    async def InitializeCA(
        self, _request: pi.InitializeCARequest, _context: CallContext
    ) -> pi.InitializeCAResponse:
        """There is always one; asking for it again makes no other."""
        return pi.InitializeCAResponse(
            success=True, message="the authority is there since the first start", ca_info=self._info()
        )

    async def GetCAInfo(self, _request: pi.GetCAInfoRequest, _context: CallContext) -> pi.CAInfo:
        return self._info()

    async def GetCACertificate(
        self, _request: pi.GetCACertificateRequest, _context: CallContext
    ) -> pi.GetCACertificateResponse:
        return ca_wire.ca_certificate(self.authority)

    # Certificates.

    async def IssueCertificate(
        self, request: pi.IssueCertificateRequest, _context: CallContext
    ) -> pi.Certificate:
        kind = ca_wire.certificate_type(request.type)
        if kind is None:
            raise InvalidArgument("type is required", field="type")
        ca_rules.check_type(kind)
        raise FailedPrecondition(
            "private keys are not made here, and the request has no public key",
            hint="make a key, call CreateCertificateRequest with csr_pem, and have it approved",
            details={"cause": "no csr"},
        )

    async def GetCertificate(
        self, request: pi.GetCertificateRequest, _context: CallContext
    ) -> pi.Certificate:
        await self.store.settled(CERTIFICATE)
        match request.WhichOneof("identifier"):
            case "id":
                found = self.certificates.get(request.id)
            case "serial_number":
                found = self.certificates.by_serial(_serial(request.serial_number))
            case _:
                raise InvalidArgument("id or serial_number is required", field="id")
        if found is None:
            raise NotFound("there is no such certificate", field=request.WhichOneof("identifier"))
        return self._shown(found)

    async def ListCertificates(
        self, request: pi.ListCertificatesRequest, _context: CallContext
    ) -> pi.ListCertificatesResponse:
        kind, state = ca_wire.certificate_type(request.type), ca_wire.certificate_state(request.status)
        await self.store.settled(CERTIFICATE)
        now_ns = self.clock.now_ns()
        found = [
            one
            for one in self.certificates.all()
            if (kind is None or one.spec.purpose == kind)
            and (state is None or ca_wire.state_of(one, now_ns=now_ns) is state)
            and (not request.HasField("node_id") or one.spec.board == request.node_id)
            and (not request.HasField("cluster_id") or one.spec.cluster_id == request.cluster_id)
            and request.backend in (pi.CERTIFICATE_BACKEND_UNSPECIFIED, pi.CERTIFICATE_BACKEND_LOCAL)
        ]
        page = page_of(found, page=request.page, page_size=request.page_size)
        return pi.ListCertificatesResponse(
            certificates=[self._shown(one) for one in page], total_count=len(found)
        )

    async def RenewCertificate(
        self, request: pi.RenewCertificateRequest, context: CallContext
    ) -> pi.Certificate:
        number = request.id
        if ADMIN not in context.principal.roles:
            number = self._own(context, number)
        renewed = await self.requests.renew(_id(number), actor=context.principal.name)
        # The documented message has no room for the certificate itself.
        pem = renewed.spec.pem.encode()
        context.set_trailing_metadata(((RENEWED_PEM, pem),))
        return self._shown(renewed)

    def _own(self, context: CallContext, number: int) -> int:
        """The number of the certificate that the caller presents, the only one that she may renew."""
        identity = credentials.presented(context.connection)
        kept = self.certificates.by_serial(f"{identity.serial:x}") if identity is not None else None
        if kept is None or number not in (0, number_of(kept)):
            raise PermissionDenied(
                "only the certificate that is presented can be renewed",
                hint="administrators renew those of others",
            )
        return number_of(kept)

    async def RevokeCertificate(
        self, request: pi.RevokeCertificateRequest, context: CallContext
    ) -> pi.RevokeCertificateResponse:
        await self.certificates.revoke(_id(request.id), reason=request.reason, actor=context.principal.name)
        return pi.RevokeCertificateResponse(success=True, message=f"certificate {request.id} is revoked")

    async def ValidateCertificate(
        self, request: pi.ValidateCertificateRequest, _context: CallContext
    ) -> pi.ValidateCertificateResponse:
        """Whether this server would believe it now, and if not, why."""
        leaf = _certificate(request.certificate_pem)
        now = self.clock.now_ns() / NS
        expired = leaf.not_valid_after_utc.timestamp() <= now
        revoked = self.revocations.find(serial=leaf.serial_number) is not None
        errors = []
        if not self._is_ours(leaf):
            errors.append("it was not issued by an authority that is trusted here")
        if expired:
            errors.append("it has expired")
        if leaf.not_valid_before_utc.timestamp() > now:
            errors.append("it is not valid yet")
        if revoked:
            errors.append("it was revoked")
        return pi.ValidateCertificateResponse(
            validation=ca_wire.validation(leaf, expired=expired, revoked=revoked, errors=errors)
        )

    # Requests.

    async def CreateCertificateRequest(
        self, request: pi.CreateCertificateRequestRequest, context: CallContext
    ) -> pi.CertificateRequest:
        actor = context.principal.name
        made = await self.requests.create(ca_wire.requested(request, actor=actor), actor=actor)
        return ca_wire.request(made)

    async def ProcessCertificateRequest(
        self, request: pi.ProcessCertificateRequestRequest, context: CallContext
    ) -> pi.Certificate:
        """The certificate that was issued; an empty one where the request was rejected, as was ordered."""
        decided = await self.requests.process(
            _id(request.id), approve=request.approve, actor=context.principal.name
        )
        status = request_status(decided)
        if status.state is RequestState.FAILED:
            raise FailedPrecondition(f"request {decided.name} failed: {status.failure_reason}")
        issued = self.certificates.get(status.certificate) if status.certificate is not None else None
        return self._shown(issued) if issued is not None else pi.Certificate()

    async def ListCertificateRequests(
        self, request: pi.ListCertificateRequestsRequest, _context: CallContext
    ) -> pi.ListCertificateRequestsResponse:
        kind, state = ca_wire.certificate_type(request.type), ca_wire.request_state(request.status)
        await self.requests.up_to_date()
        found = [
            one
            for one in self.requests.all()
            if (kind is None or one.spec.type is kind)
            and (state is None or request_status(one).state is state)
            and (not request.HasField("node_id") or one.spec.board == request.node_id)
            and (not request.HasField("cluster_id") or one.spec.cluster_id == request.cluster_id)
        ]
        page = page_of(found, page=request.page, page_size=request.page_size)
        return pi.ListCertificateRequestsResponse(
            requests=[ca_wire.request(one) for one in page], total_count=len(found)
        )

    # Housekeeping.

    async def GetCertificateStats(
        self, _request: pi.GetCertificateStatsRequest, _context: CallContext
    ) -> pi.CertificateStats:
        await self.store.settled(CERTIFICATE)
        now_ns = self.clock.now_ns()
        found = self.certificates.all()
        states = [ca_wire.state_of(one, now_ns=now_ns) for one in found]
        active = [one for one, state in zip(found, states, strict=True) if state is IssuedState.ACTIVE]
        return pi.CertificateStats(
            total_certificates=len(found),
            active_certificates=len(active),
            expired_certificates=states.count(IssuedState.EXPIRED),
            revoked_certificates=states.count(IssuedState.REVOKED),
            certificates_issued_24h=sum(one.created_at_ns > now_ns - DAY_NS for one in found),
            certificates_expiring_30d=sum(one.spec.not_after_ns <= now_ns + 30 * DAY_NS for one in active),
            ca_info=self._info(),
        )

    async def CleanupExpiredCertificates(
        self, _request: pi.CleanupExpiredCertificatesRequest, context: CallContext
    ) -> pi.CleanupExpiredCertificatesResponse:
        cleaned = await self.requests.clean_up(now_ns=self.clock.now_ns(), actor=context.principal.name)
        days = RETENTION_SECONDS / 86_400
        return pi.CleanupExpiredCertificatesResponse(
            cleaned_count=cleaned, message=f"forgot {cleaned} certificates that expired {days:g} days ago"
        )

    # What they share.

    def _info(self) -> pi.CAInfo:
        now_ns = self.clock.now_ns()
        found: Sequence[Certificate] = self.certificates.all()
        active = sum(ca_wire.state_of(one, now_ns=now_ns) is IssuedState.ACTIVE for one in found)
        return ca_wire.ca_info(self.authority, issued=len(found), active=active, now_ns=now_ns)

    def _shown(self, found: Certificate) -> pi.Certificate:
        return ca_wire.certificate(found, now_ns=self.clock.now_ns())

    def _is_ours(self, leaf: x509.Certificate) -> bool:
        for member in self.authority.members:
            try:
                leaf.verify_directly_issued_by(member.certificate)
            except (ValueError, TypeError, InvalidSignature):
                continue
            return True
        return False


def _id(number: int) -> int:
    if not number:
        raise InvalidArgument("id is required", field="id")
    return number


def _serial(text: str) -> str:
    serial = text.strip().lower().replace(":", "")
    if not serial or len(serial) > SERIAL_LIMIT or any(one not in "0123456789abcdef" for one in serial):
        raise InvalidArgument("serial_number is hexadecimal", field="serial_number")
    return serial.lstrip("0") or "0"


def _certificate(pem: str) -> x509.Certificate:
    if len(pem) > PEM_LIMIT_BYTES:
        raise InvalidArgument(
            f"certificate_pem is longer than {PEM_LIMIT_BYTES} bytes", field="certificate_pem"
        )
    try:
        return x509.load_pem_x509_certificate(pem.encode())
    except ValueError as error:
        raise InvalidArgument("certificate_pem is no certificate in PEM", field="certificate_pem") from error
