"""REST: the certificate authority, with the same answers as over gRPC, spelled as JSON."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
from msgspec.structs import asdict

from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.ca import rules as ca_rules
from fleetplane.domains.boards.ca.issued import IssuedCertificates
from fleetplane.domains.boards.ca.requests import CertificateRequests
from fleetplane.domains.boards.ca.rules import (
    CertificateRequest,
    CertificateType,
    IssuedState,
    RequestSpec,
    RequestState,
    request_status,
)
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
    spelled_as,
)
from fleetplane.domains.boards.rest.shapes.telemetry import (
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
from fleetplane.rpc import CallContext
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

REASON_LIMIT = 256
_ONE = "/ca/certificates/{id}"
_ROUTES = RouteGroup("Certificates")
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
        certificates: IssuedCertificates,
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
            _ROUTES.post("/ca/initialize", self.initialize, ADMINISTER),
            _ROUTES.get("/ca/info", self.info, READ),
            _ROUTES.get("/ca/certificate", self.certificate, READ),
            _ROUTES.get("/ca/stats", self.stats, READ),
            _ROUTES.post("/ca/cleanup", self.cleanup, ADMINISTER),
        )

    def _certificate_routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(
                "/ca/certificates",
                self.list,
                READ,
                query=(
                    Query(name="status", summary="Only in this state", choices=tuple(IssuedState)),
                    *_FILTERS,
                ),
            ),
            _ROUTES.post("/ca/certificates", self.issue, ADMINISTER, body=IssueBody, status=CREATED),
            _ROUTES.post("/ca/certificates/validate", self.validate, READ, body=ValidateBody),
            _ROUTES.get("/ca/certificates/serial/{serial}", self.by_serial, READ),
            _ROUTES.get(_ONE, self.show, READ),
            _ROUTES.post(f"{_ONE}/renew", self.renew, ADMINISTER),
            _ROUTES.post(f"{_ONE}/revoke", self.revoke, ADMINISTER, body=RevokeBody),
        )

    def _request_routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get(
                "/ca/requests",
                self.requests,
                OPERATE,
                query=(
                    Query(name="status", summary="Only in this state", choices=tuple(RequestState)),
                    *_FILTERS,
                ),
            ),
            _ROUTES.post("/ca/requests", self.request, OPERATE, body=RequestBody, status=CREATED),
            _ROUTES.post("/ca/requests/{id}/process", self.process, ADMINISTER, body=ProcessBody),
        )

    # The authority.

    async def initialize(self, call: BoardCall) -> Answer[InitializedAuthority]:
        """Confirm that the certificate authority exists."""
        told = await self._methods.InitializeCA(pi.InitializeCARequest(), _acting(call))
        return Answer(content=spelled_as(told, InitializedAuthority))

    async def info(self, call: BoardCall) -> Answer[ShownAuthority]:
        """Get the certificate authority."""
        told = await self._methods.GetCAInfo(pi.GetCAInfoRequest(), _acting(call))
        return Answer(content=spelled_as(told, ShownAuthority))

    async def certificate(self, call: BoardCall) -> Answer[AuthorityCertificate]:
        """Get the authority's certificate, in PEM."""
        told = await self._methods.GetCACertificate(pi.GetCACertificateRequest(), _acting(call))
        return Answer(content=spelled_as(told, AuthorityCertificate))

    async def stats(self, call: BoardCall) -> Answer[CertificateCounts]:
        """Count issued certificates by state."""
        told = await self._methods.GetCertificateStats(pi.GetCertificateStatsRequest(), _acting(call))
        return Answer(content=spelled_as(told, CertificateCounts))

    async def cleanup(self, call: BoardCall) -> Answer[CleanedCertificates]:
        """Delete records of certificates that expired long ago."""
        request = pi.CleanupExpiredCertificatesRequest()
        told = await self._methods.CleanupExpiredCertificates(request, _acting(call))
        return Answer(content=spelled_as(told, CleanedCertificates, success=True))

    # Certificates.

    async def list(self, call: BoardCall) -> Answer[CertificateRows]:
        """List issued certificates."""
        kind, state = choice(call, "type", CertificateType), choice(call, "status", IssuedState)
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
        """Refused: private keys are not made here; use /ca/requests."""
        body: IssueBody = call.body
        # Always refused, with words that say what to do: there is no key in it to certify.
        request = pi.IssueCertificateRequest(
            common_name=body.common_name, type=f"CERTIFICATE_TYPE_{body.type.name}"
        )
        made = await self._methods.IssueCertificate(request, _acting(call))
        return Answer(content=spelled_as(made, CertificateFields))

    async def show(self, call: BoardCall) -> Answer[ShownCertificate]:
        """Get a certificate."""
        number = number_in(call)
        found = self._certificates.get(number)
        if found is None:
            raise NotFound(f"certificate {number} is not known", field="id")
        return Answer(content=self._shown(found))

    async def by_serial(self, call: BoardCall) -> Answer[ShownCertificate]:
        """Get a certificate by serial number."""
        request = pi.GetCertificateRequest(serial_number=call.path["serial"][:128])
        told = await self._methods.GetCertificate(request, _acting(call))
        found = self._certificates.get(told.id)
        assert found is not None, "it was found just now"
        return Answer(content=self._shown(found))

    async def renew(self, call: BoardCall) -> Answer[ShownCertificate]:
        """Renew a certificate for the same key and names."""
        return Answer(content=self._shown(await self._requests.renew(number_in(call), actor=actor(call))))

    async def revoke(self, call: BoardCall) -> Answer[RevokedCertificate]:
        """Revoke a certificate."""
        body: RevokeBody = call.body
        revoked = await self._certificates.revoke(
            number_in(call), reason=body.reason[:REASON_LIMIT], actor=call.caller.name
        )
        words = f"certificate {revoked.name} is revoked"
        return Answer(content=RevokedCertificate(message=words, certificate=self._shown(revoked)))

    async def validate(self, call: BoardCall) -> Answer[CheckedCertificate]:
        """Validate a certificate against this authority."""
        body: ValidateBody = call.body
        request = pi.ValidateCertificateRequest(certificate_pem=body.certificate_pem)
        told = await self._methods.ValidateCertificate(request, _acting(call))
        return Answer(content=spelled_as(told.validation, CheckedCertificate))

    # Requests.

    async def requests(self, call: BoardCall) -> Answer[RequestRows]:
        """List certificate requests."""
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
        """Submit a certificate signing request."""
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
        """Approve or reject a certificate request."""
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
        return spelled_as(
            told,
            ShownCertificate,
            certificate_pem=found.spec.pem,
            sans=_by_kind(told.sans),
            key_usage=",".join(told.key_usage),
            ext_key_usage=",".join(told.ext_key_usage),
        )


def _acting(call: BoardCall) -> CallContext:
    return cast("CallContext", _Acting(call.caller.principal))


def _request(found: CertificateRequest) -> ShownRequest:
    told = ca_wire.request(found)
    return spelled_as(
        told,
        ShownRequest,
        sans=_json(list(told.sans)) if told.sans else "",
        key_usage=_bracketed(told.key_usage),
        ext_key_usage=_bracketed(told.ext_key_usage),
    )


def _by_kind(names: Iterable[str]) -> str:
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_kind_of(name), []).append(name)
    return _json(dict(sorted(kinds.items()))) if kinds else ""


def _kind_of(name: str) -> str:
    if "://" in name:
        return "uri"
    if "@" in name:
        return "email"
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "dns"
    return "ip"


def _bracketed(words: Sequence[str]) -> str:
    return f"[{','.join(words)}]" if words else ""


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
