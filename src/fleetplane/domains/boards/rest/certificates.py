"""REST: the certificate authority, with the same answers as over gRPC, spelled as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from msgspec.structs import asdict

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.ca import rules as ca_rules
from fleetplane.domains.boards.ca.issued import Certificates
from fleetplane.domains.boards.ca.kinds import (
    CertificateRequest,
    CertificateState,
    CertificateType,
    RequestSpec,
    RequestState,
    request_status,
)
from fleetplane.domains.boards.ca.requests import CertificateRequests
from fleetplane.domains.boards.grpc.certificates import CertificateMethods
from fleetplane.domains.boards.kinds import Certificate
from fleetplane.domains.boards.rest.common import (
    CREATED,
    PAGING,
    BoardCall,
    actor,
    choice,
    listed,
    number_in,
    reference,
)
from fleetplane.domains.boards.rest.shapes.base import spelled_as
from fleetplane.domains.boards.rest.shapes.certificates import (
    AuthorityCertificate,
    CertificateCounts,
    CertificateFields,
    CertificateRows,
    CheckedCertificate,
    CleanedCertificates,
    DecidedRequest,
    InitializedAuthority,
    RequestRows,
    RevokedCertificate,
    ShownAuthority,
    ShownCertificate,
    ShownRequest,
)
from fleetplane.domains.boards.wire import certificates as ca_wire
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.rpc import CallContext, Needs
from fleetplane.web.rest.routes import Answer, Query, Route

REASON_LIMIT = 256
_ONE = "/ca/certificates/{id}"
_TAG = "Certificates"
_FILTERS: Sequence[Query] = (
    Query(name="type", summary="Only of this type", choices=tuple(CertificateType)),
    Query(name="node_id", summary="Only of this board", kind="integer", low=1),
    Query(name="cluster_id", summary="Only of this cluster", kind="integer", low=1),
    *PAGING,
)


class IssueBody(msgspec.Struct, forbid_unknown_fields=True):
    common_name: str
    type: CertificateType
    sans: list[str] = []
    validity_period: str = ""
    key_usage: list[str] = []
    ext_key_usage: list[str] = []
    node_id: int | None = None
    cluster_id: int | None = None
    auto_renew: bool = False


class RequestBody(msgspec.Struct, forbid_unknown_fields=True):
    csr_pem: str
    common_name: str
    type: CertificateType
    sans: list[str] = []
    validity_period: str = ""
    key_usage: list[str] = []
    ext_key_usage: list[str] = []
    node_id: int | None = None
    cluster_id: int | None = None


class RevokeBody(msgspec.Struct, forbid_unknown_fields=True):
    reason: str


class ValidateBody(msgspec.Struct, forbid_unknown_fields=True):
    certificate_pem: str


class ProcessBody(msgspec.Struct, forbid_unknown_fields=True):
    approve: bool


@dataclass(frozen=True, slots=True)
class _Acting:
    """All that those methods ask of a call: who makes it."""

    principal: Principal

    def set_trailing_metadata(self, _metadata: object) -> None:
        """REST gives the certificate in the body."""


class CertificateRoutes:
    def __init__(
        self,
        *,
        methods: CertificateMethods,
        certificates: Certificates,
        requests: CertificateRequests,
        clock: Clock,
    ) -> None:
        self._methods = methods
        self._certificates = certificates
        self._requests = requests
        self._clock = clock

    def routes(self) -> Sequence[Route]:
        return (*self._authority_routes(), *self._certificate_routes(), *self._request_routes())

    def _authority_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST",
                path="/ca/initialize",
                needs=Needs.WRITES,
                handler=self.initialize,
                tag=_TAG,
                summary="Confirm that the certificate authority exists",
                permission=ADMINISTER,
                answer=InitializedAuthority,
            ),
            Route(
                method="GET",
                path="/ca/info",
                needs=Needs.STORE,
                handler=self.info,
                tag=_TAG,
                permission=READ,
                summary="Get the certificate authority",
                answer=ShownAuthority,
            ),
            Route(
                method="GET",
                path="/ca/certificate",
                needs=Needs.STORE,
                handler=self.certificate,
                tag=_TAG,
                permission=READ,
                summary="Get the authority's certificate, in PEM",
                answer=AuthorityCertificate,
            ),
            Route(
                method="GET",
                path="/ca/stats",
                needs=Needs.STORE,
                handler=self.stats,
                tag=_TAG,
                permission=READ,
                summary="Count issued certificates by state",
                answer=CertificateCounts,
            ),
            Route(
                method="POST",
                path="/ca/cleanup",
                needs=Needs.WRITES,
                handler=self.cleanup,
                tag=_TAG,
                permission=ADMINISTER,
                summary="Delete records of certificates that expired long ago",
                answer=CleanedCertificates,
            ),
        )

    def _certificate_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET",
                path="/ca/certificates",
                handler=self.list,
                needs=Needs.STORE,
                tag=_TAG,
                permission=READ,
                summary="List issued certificates",
                answer=CertificateRows,
                query=(
                    Query(name="status", summary="Only in this state", choices=tuple(CertificateState)),
                    *_FILTERS,
                ),
            ),
            Route(
                method="POST",
                path="/ca/certificates",
                needs=Needs.WRITES,
                handler=self.issue,
                tag=_TAG,
                permission=ADMINISTER,
                summary="Refused: private keys are not made here; use /ca/requests",
                body=IssueBody,
                answer=CertificateFields,
                status=CREATED,
            ),
            Route(
                method="POST",
                path="/ca/certificates/validate",
                needs=Needs.WRITES,
                handler=self.validate,
                tag=_TAG,
                summary="Validate a certificate against this authority",
                permission=READ,
                body=ValidateBody,
                answer=CheckedCertificate,
            ),
            Route(
                method="GET",
                path="/ca/certificates/serial/{serial}",
                needs=Needs.STORE,
                handler=self.by_serial,
                tag=_TAG,
                permission=READ,
                summary="Get a certificate by serial number",
                answer=ShownCertificate,
            ),
            Route(
                method="GET",
                path=_ONE,
                handler=self.show,
                needs=Needs.STORE,
                tag=_TAG,
                permission=READ,
                summary="Get a certificate",
                answer=ShownCertificate,
            ),
            Route(
                method="POST",
                path=f"{_ONE}/renew",
                needs=Needs.WRITES,
                handler=self.renew,
                tag=_TAG,
                permission=ADMINISTER,
                summary="Renew a certificate for the same key and names",
                answer=ShownCertificate,
            ),
            Route(
                method="POST",
                path=f"{_ONE}/revoke",
                needs=Needs.WRITES,
                handler=self.revoke,
                tag=_TAG,
                permission=ADMINISTER,
                summary="Revoke a certificate",
                body=RevokeBody,
                answer=RevokedCertificate,
            ),
        )

    def _request_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET",
                path="/ca/requests",
                handler=self.requests,
                needs=Needs.STORE,
                tag=_TAG,
                permission=OPERATE,
                summary="List certificate requests",
                answer=RequestRows,
                query=(
                    Query(name="status", summary="Only in this state", choices=tuple(RequestState)),
                    *_FILTERS,
                ),
            ),
            Route(
                method="POST",
                path="/ca/requests",
                needs=Needs.WRITES,
                handler=self.request,
                tag=_TAG,
                permission=OPERATE,
                summary="Submit a certificate signing request",
                body=RequestBody,
                answer=ShownRequest,
                status=CREATED,
            ),
            Route(
                method="POST",
                path="/ca/requests/{id}/process",
                needs=Needs.WRITES,
                handler=self.process,
                tag=_TAG,
                permission=ADMINISTER,
                summary="Approve or reject a certificate request",
                body=ProcessBody,
                answer=DecidedRequest,
            ),
        )

    # The authority.

    async def initialize(self, call: BoardCall) -> Answer[InitializedAuthority]:
        told = await self._methods.InitializeCA(pi.InitializeCARequest(), _acting(call))
        return Answer(content=spelled_as(told, InitializedAuthority))

    async def info(self, call: BoardCall) -> Answer[ShownAuthority]:
        told = await self._methods.GetCAInfo(pi.GetCAInfoRequest(), _acting(call))
        return Answer(content=spelled_as(told, ShownAuthority))

    async def certificate(self, call: BoardCall) -> Answer[AuthorityCertificate]:
        told = await self._methods.GetCACertificate(pi.GetCACertificateRequest(), _acting(call))
        return Answer(content=spelled_as(told, AuthorityCertificate))

    async def stats(self, call: BoardCall) -> Answer[CertificateCounts]:
        told = await self._methods.GetCertificateStats(pi.GetCertificateStatsRequest(), _acting(call))
        return Answer(content=spelled_as(told, CertificateCounts))

    async def cleanup(self, call: BoardCall) -> Answer[CleanedCertificates]:
        request = pi.CleanupExpiredCertificatesRequest()
        told = await self._methods.CleanupExpiredCertificates(request, _acting(call))
        return Answer(content=spelled_as(told, CleanedCertificates))

    # Certificates.

    async def list(self, call: BoardCall) -> Answer[CertificateRows]:
        kind, state = choice(call, "type", CertificateType), choice(call, "status", CertificateState)
        board, cluster = reference(call, "node_id"), reference(call, "cluster_id")
        now_ns = self._clock.now_ns()
        found = [
            one
            for one in self._certificates.all()
            if kind in (None, one.spec.purpose)
            and state in (None, ca_wire.state_of(one, now_ns=now_ns))
            and board in (None, one.spec.board)
            and cluster in (None, one.spec.cluster_id)
        ]
        return Answer(content=listed(call, found, self._shown, CertificateRows))

    async def issue(self, call: BoardCall) -> Answer[CertificateFields]:
        body: IssueBody = call.body
        # Always refused, with words that say what to do: there is no key in it to certify.
        request = pi.IssueCertificateRequest(
            common_name=body.common_name, type=f"CERTIFICATE_TYPE_{body.type.name}"
        )
        made = await self._methods.IssueCertificate(request, _acting(call))
        return Answer(content=spelled_as(made, CertificateFields))

    async def show(self, call: BoardCall) -> Answer[ShownCertificate]:
        number = number_in(call)
        found = self._certificates.get(number)
        if found is None:
            raise NotFound(f"certificate {number} is not known", field="id")
        return Answer(content=self._shown(found))

    async def by_serial(self, call: BoardCall) -> Answer[ShownCertificate]:
        request = pi.GetCertificateRequest(serial_number=call.path["serial"][:128])
        told = await self._methods.GetCertificate(request, _acting(call))
        found = self._certificates.get(told.id)
        assert found is not None, "it was found just now"
        return Answer(content=self._shown(found))

    async def renew(self, call: BoardCall) -> Answer[ShownCertificate]:
        return Answer(content=self._shown(await self._requests.renew(number_in(call), actor=actor(call))))

    async def revoke(self, call: BoardCall) -> Answer[RevokedCertificate]:
        body: RevokeBody = call.body
        revoked = await self._certificates.revoke(
            number_in(call), reason=body.reason[:REASON_LIMIT], actor=call.caller.name
        )
        words = f"certificate {revoked.name} is revoked"
        return Answer(content=RevokedCertificate(message=words, certificate=self._shown(revoked)))

    async def validate(self, call: BoardCall) -> Answer[CheckedCertificate]:
        body: ValidateBody = call.body
        request = pi.ValidateCertificateRequest(certificate_pem=body.certificate_pem)
        told = await self._methods.ValidateCertificate(request, _acting(call))
        return Answer(content=spelled_as(told.validation, CheckedCertificate))

    # Requests.

    async def requests(self, call: BoardCall) -> Answer[RequestRows]:
        kind, state = choice(call, "type", CertificateType), choice(call, "status", RequestState)
        board, cluster = reference(call, "node_id"), reference(call, "cluster_id")
        found = [
            one
            for one in self._requests.all()
            if kind in (None, one.spec.type)
            and state in (None, request_status(one).state)
            and board in (None, one.spec.board)
            and cluster in (None, one.spec.cluster_id)
        ]
        return Answer(content=listed(call, found, _request, RequestRows))

    async def request(self, call: BoardCall) -> Answer[ShownRequest]:
        body: RequestBody = call.body
        spec = RequestSpec(
            common_name=body.common_name.strip(),
            type=body.type,
            csr_pem=body.csr_pem,
            requested_by=call.caller.name,
            sans=tuple(body.sans),
            validity_seconds=ca_rules.validity_seconds(body.validity_period),
            validity_period=body.validity_period,
            key_usage=tuple(body.key_usage),
            ext_key_usage=tuple(body.ext_key_usage),
            board=body.node_id,
            cluster_id=body.cluster_id,
        )
        view = call.answering(lambda made: Answer(content=_request(made)))
        return view(await self._requests.create(spec, actor=actor(call)))

    async def process(self, call: BoardCall) -> Answer[DecidedRequest]:
        body: ProcessBody = call.body
        decided = await self._requests.process(number_in(call), approve=body.approve, actor=actor(call))
        number = request_status(decided).certificate
        issued = self._certificates.get(number) if number is not None else None
        return Answer(
            content=DecidedRequest(
                **asdict(_request(decided)),
                certificate=self._shown(issued) if issued is not None else None,
            )
        )

    def _shown(self, found: Certificate) -> ShownCertificate:
        told = ca_wire.certificate(found, now_ns=self._clock.now_ns())
        return spelled_as(told, ShownCertificate, certificate_pem=found.spec.pem)


def _acting(call: BoardCall) -> CallContext:
    return cast("CallContext", _Acting(call.caller.principal))


def _request(found: CertificateRequest) -> ShownRequest:
    return spelled_as(ca_wire.request(found), ShownRequest)
