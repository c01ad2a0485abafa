"""REST: the certificate authority, with the same answers as over gRPC, spelled as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from fleetplane.domains.boards import ca_rules, ca_wire, wire_json
from fleetplane.domains.boards.access import ADMINISTER, OPERATE, READ
from fleetplane.domains.boards.ca_kinds import (
    CertificateRequest,
    CertificateState,
    CertificateType,
    RequestSpec,
    RequestState,
    request_status,
)
from fleetplane.domains.boards.ca_requests import CertificateRequests
from fleetplane.domains.boards.ca_service import CertificateMethods
from fleetplane.domains.boards.certificates import Certificates
from fleetplane.domains.boards.kinds import Certificate
from fleetplane.domains.boards.rest import (
    CREATED,
    PAGING,
    BoardCall,
    Json,
    actor,
    choice,
    listed,
    number_in,
    reference,
)  # fmt: skip
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import NotFound
from fleetplane.rpc import CallContext
from fleetplane.web.routes import Answer, Query, Route

REASON_LIMIT = 256
_ONE = "/ca/certificates/{id}"
_TAG = "Certificates"
_FILTERS: Sequence[Query] = (
    Query(name="type", summary="Of this type", choices=tuple(CertificateType)),
    Query(name="node_id", summary="Of this board", kind="integer", low=1),
    Query(name="cluster_id", summary="Of this cluster", kind="integer", low=1),
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
                method="POST", path="/ca/initialize", handler=self.initialize, tag=_TAG,
                summary="There is always an authority; this says so", permission=ADMINISTER,
                answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/ca/info", handler=self.info, tag=_TAG, permission=READ,
                summary="The authority", answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/ca/certificate", handler=self.certificate, tag=_TAG, permission=READ,
                summary="Its certificate, in PEM", answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/ca/stats", handler=self.stats, tag=_TAG, permission=READ,
                summary="How many certificates there are", answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/ca/cleanup", handler=self.cleanup, tag=_TAG, permission=ADMINISTER,
                summary="Forget what expired long ago", answer=dict[str, Any],
            ),
        )  # fmt: skip

    def _certificate_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/ca/certificates", handler=self.list, tag=_TAG, permission=READ,
                summary="Certificates that were issued", answer=dict[str, Any],
                query=(
                    Query(name="status", summary="In this state", choices=tuple(CertificateState)),
                    *_FILTERS,
                ),
            ),
            Route(
                method="POST", path="/ca/certificates", handler=self.issue, tag=_TAG, permission=ADMINISTER,
                summary="Says what to do instead: private keys are not made here", body=IssueBody,
                answer=dict[str, Any], status=CREATED,
            ),
            Route(
                method="POST", path="/ca/certificates/validate", handler=self.validate, tag=_TAG,
                summary="Whether this server would believe a certificate", permission=READ,
                body=ValidateBody, answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/ca/certificates/serial/{serial}", handler=self.by_serial, tag=_TAG,
                permission=READ, summary="One certificate, by its serial number", answer=dict[str, Any],
            ),
            Route(
                method="GET", path=_ONE, handler=self.show, tag=_TAG, permission=READ,
                summary="One certificate", answer=dict[str, Any],
            ),
            Route(
                method="POST", path=f"{_ONE}/renew", handler=self.renew, tag=_TAG, permission=ADMINISTER,
                summary="Another for the same key and names", answer=dict[str, Any],
            ),
            Route(
                method="POST", path=f"{_ONE}/revoke", handler=self.revoke, tag=_TAG, permission=ADMINISTER,
                summary="Refuse it from now on, everywhere", body=RevokeBody, answer=dict[str, Any],
            ),
        )  # fmt: skip

    def _request_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/ca/requests", handler=self.requests, tag=_TAG, permission=OPERATE,
                summary="Requests for certificates", answer=dict[str, Any],
                query=(
                    Query(name="status", summary="In this state", choices=tuple(RequestState)),
                    *_FILTERS,
                ),
            ),
            Route(
                method="POST", path="/ca/requests", handler=self.request, tag=_TAG, permission=OPERATE,
                summary="Ask for a certificate for a key that one has", body=RequestBody,
                answer=dict[str, Any], status=CREATED,
            ),
            Route(
                method="POST", path="/ca/requests/{id}/process", handler=self.process, tag=_TAG,
                permission=ADMINISTER, summary="Issue it, or refuse", body=ProcessBody,
                answer=dict[str, Any],
            ),
        )  # fmt: skip

    # The authority.

    async def initialize(self, call: BoardCall) -> Answer[Json]:
        told = await self._methods.InitializeCA(pi.InitializeCARequest(), _acting(call))
        return Answer(content=wire_json.plain(told))

    async def info(self, call: BoardCall) -> Answer[Json]:
        told = await self._methods.GetCAInfo(pi.GetCAInfoRequest(), _acting(call))
        return Answer(content=wire_json.plain(told))

    async def certificate(self, call: BoardCall) -> Answer[Json]:
        told = await self._methods.GetCACertificate(pi.GetCACertificateRequest(), _acting(call))
        return Answer(content=wire_json.plain(told))

    async def stats(self, call: BoardCall) -> Answer[Json]:
        told = await self._methods.GetCertificateStats(pi.GetCertificateStatsRequest(), _acting(call))
        return Answer(content=wire_json.plain(told))

    async def cleanup(self, call: BoardCall) -> Answer[Json]:
        request = pi.CleanupExpiredCertificatesRequest()
        told = await self._methods.CleanupExpiredCertificates(request, _acting(call))
        return Answer(content=wire_json.plain(told))

    # Certificates.

    async def list(self, call: BoardCall) -> Answer[Json]:
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
        return Answer(content=listed(call, found, self._shown, name="certificates"))

    async def issue(self, call: BoardCall) -> Answer[Json]:
        body: IssueBody = call.body
        # Always refused, with words that say what to do: there is no key in it to certify.
        request = pi.IssueCertificateRequest(
            common_name=body.common_name, type=f"CERTIFICATE_TYPE_{body.type.name}"
        )
        made = await self._methods.IssueCertificate(request, _acting(call))
        return Answer(content=wire_json.plain(made))

    async def show(self, call: BoardCall) -> Answer[Json]:
        number = number_in(call)
        found = self._certificates.get(number)
        if found is None:
            raise NotFound(f"certificate {number} is not known", field="id")
        return Answer(content=self._shown(found))

    async def by_serial(self, call: BoardCall) -> Answer[Json]:
        request = pi.GetCertificateRequest(serial_number=call.path["serial"][:128])
        told = await self._methods.GetCertificate(request, _acting(call))
        found = self._certificates.get(told.id)
        assert found is not None, "it was found just now"
        return Answer(content=self._shown(found))

    async def renew(self, call: BoardCall) -> Answer[Json]:
        return Answer(content=self._shown(await self._requests.renew(number_in(call), actor=actor(call))))

    async def revoke(self, call: BoardCall) -> Answer[Json]:
        body: RevokeBody = call.body
        revoked = await self._certificates.revoke(
            number_in(call), reason=body.reason[:REASON_LIMIT], actor=call.caller.name
        )
        words = f"certificate {revoked.name} is revoked"
        return Answer(content={"message": words, "certificate": self._shown(revoked)})

    async def validate(self, call: BoardCall) -> Answer[Json]:
        body: ValidateBody = call.body
        request = pi.ValidateCertificateRequest(certificate_pem=body.certificate_pem)
        told = await self._methods.ValidateCertificate(request, _acting(call))
        return Answer(content=wire_json.plain(told.validation))

    # Requests.

    async def requests(self, call: BoardCall) -> Answer[Json]:
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
        return Answer(content=listed(call, found, _request, name="requests"))

    async def request(self, call: BoardCall) -> Answer[Json]:
        body: RequestBody = call.body
        spec = RequestSpec(
            common_name=body.common_name.strip(), type=body.type, csr_pem=body.csr_pem,
            requested_by=call.caller.name, sans=tuple(body.sans),
            validity_seconds=ca_rules.validity_seconds(body.validity_period),
            validity_period=body.validity_period, key_usage=tuple(body.key_usage),
            ext_key_usage=tuple(body.ext_key_usage), board=body.node_id, cluster_id=body.cluster_id,
        )  # fmt: skip
        view = call.answering(lambda made: Answer(content=_request(made)))
        return view(await self._requests.create(spec, actor=actor(call)))

    async def process(self, call: BoardCall) -> Answer[Json]:
        body: ProcessBody = call.body
        decided = await self._requests.process(number_in(call), approve=body.approve, actor=actor(call))
        number = request_status(decided).certificate
        issued = self._certificates.get(number) if number is not None else None
        return Answer(
            content={**_request(decided), "certificate": self._shown(issued) if issued is not None else None}
        )

    def _shown(self, found: Certificate) -> Json:
        told = wire_json.plain(ca_wire.certificate(found, now_ns=self._clock.now_ns()))
        return {**told, "certificate_pem": found.spec.pem}


def _acting(call: BoardCall) -> CallContext:
    return cast("CallContext", _Acting(call.caller.principal))


def _request(found: CertificateRequest) -> Json:
    return wire_json.plain(ca_wire.request(found))
