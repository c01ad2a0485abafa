"""Protobuf to certificates and requests for them, and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from cryptography import x509
from cryptography.x509.oid import NameOID

from fleetplane.domains.boards.ca import rules as ca_rules
from fleetplane.domains.boards.ca.rules import (
    CertificateRequest,
    CertificateType,
    IssuedState,
    RequestSpec,
    RequestState,
    request_status,
)
from fleetplane.domains.boards.kinds import Certificate, number_of
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.values.timestamps import timestamp

_TYPES: Final[Mapping[CertificateType, pi.CertificateType]] = {
    CertificateType.CA: pi.CERTIFICATE_TYPE_CA,
    CertificateType.SERVER: pi.CERTIFICATE_TYPE_SERVER,
    CertificateType.CLIENT: pi.CERTIFICATE_TYPE_CLIENT,
    CertificateType.SSH: pi.CERTIFICATE_TYPE_SSH,
    CertificateType.INTERMEDIATE: pi.CERTIFICATE_TYPE_INTERMEDIATE,
}
_STATES: Final[Mapping[IssuedState, pi.CertificateStatus]] = {
    IssuedState.ACTIVE: pi.CERTIFICATE_STATUS_ACTIVE,
    IssuedState.EXPIRED: pi.CERTIFICATE_STATUS_EXPIRED,
    IssuedState.REVOKED: pi.CERTIFICATE_STATUS_REVOKED,
    IssuedState.PENDING: pi.CERTIFICATE_STATUS_PENDING,
    IssuedState.FAILED: pi.CERTIFICATE_STATUS_FAILED,
    IssuedState.RENEWING: pi.CERTIFICATE_STATUS_RENEWING,
}
_REQUESTS: Final[Mapping[RequestState, pi.CSRStatus]] = {
    RequestState.PENDING: pi.CSR_STATUS_PENDING,
    RequestState.APPROVED: pi.CSR_STATUS_APPROVED,
    RequestState.REJECTED: pi.CSR_STATUS_REJECTED,
    RequestState.FAILED: pi.CSR_STATUS_FAILED,
}
_TYPES_BACK = {int(number): kind for kind, number in _TYPES.items()}
_STATES_BACK = {int(number): state for state, number in _STATES.items()}
_REQUESTS_BACK = {int(number): state for state, number in _REQUESTS.items()}

T = TypeVar("T")


def state_of(found: Certificate, *, now_ns: int) -> IssuedState:
    if found.status is not None and found.status.revoked_at_ns is not None:
        return IssuedState.REVOKED
    return IssuedState.EXPIRED if found.spec.not_after_ns <= now_ns else IssuedState.ACTIVE


def certificate(found: Certificate, *, now_ns: int) -> pi.Certificate:
    spec, status = found.spec, found.status
    revoked = status is not None and status.revoked_at_ns is not None
    return pi.Certificate(
        id=number_of(found),
        serial_number=spec.serial,
        common_name=spec.common_name,
        type=_TYPES[CertificateType(spec.purpose)],
        status=_STATES[state_of(found, now_ns=now_ns)],
        subject=spec.subject,
        issuer=spec.issuer,
        not_before=timestamp(spec.not_before_ns),
        not_after=timestamp(spec.not_after_ns),
        sans=spec.sans,
        key_usage=spec.key_usage,
        ext_key_usage=spec.ext_key_usage,
        backend=pi.CERTIFICATE_BACKEND_LOCAL,
        node_id=spec.board,
        cluster_id=spec.cluster_id,
        auto_renew=spec.auto_renew,
        revoked_at=timestamp(status.revoked_at_ns) if status is not None and revoked else None,
        revoked_reason=status.revoked_reason if status is not None and revoked else None,
        created_at=timestamp(found.created_at_ns),
        updated_at=timestamp(found.updated_at_ns),
    )


def request(found: CertificateRequest) -> pi.CertificateRequest:
    spec, status = found.spec, request_status(found)
    return pi.CertificateRequest(
        id=int(found.name),
        common_name=spec.common_name,
        type=_TYPES[spec.type],
        status=_REQUESTS[status.state],
        sans=spec.sans,
        validity_period=spec.validity_period,
        key_usage=spec.key_usage,
        ext_key_usage=spec.ext_key_usage,
        node_id=spec.board,
        cluster_id=spec.cluster_id,
        processed_at=timestamp(status.processed_at_ns),
        certificate_id=status.certificate,
        failure_reason=status.failure_reason or None,
        created_at=timestamp(found.created_at_ns),
        updated_at=timestamp(found.updated_at_ns),
    )


def requested(said: pi.CreateCertificateRequestRequest, *, actor: str) -> RequestSpec:
    kind = certificate_type(said.type)
    if kind is None:
        raise InvalidArgument("type is required", field="type")
    return RequestSpec(
        common_name=said.common_name.strip(),
        type=kind,
        csr_pem=said.csr_pem,
        requested_by=actor,
        sans=tuple(said.sans),
        validity_seconds=ca_rules.validity_seconds(said.validity_period),
        validity_period=said.validity_period,
        key_usage=tuple(said.key_usage),
        ext_key_usage=tuple(said.ext_key_usage),
        board=said.node_id if said.HasField("node_id") else None,
        cluster_id=said.cluster_id if said.HasField("cluster_id") else None,
    )


def ca_info(authority: Authority, *, issued: int, active: int, now_ns: int) -> pi.CAInfo:
    """The authority that signs now; while it is being replaced another is trusted beside it."""
    own = authority.members[0].certificate
    ended = _ns(own.not_valid_after_utc.timestamp()) <= now_ns
    names = own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    begun = timestamp(_ns(own.not_valid_before_utc.timestamp()))
    return pi.CAInfo(
        id=1,
        name=str(names[0].value) if names else "",
        type=pi.CA_TYPE_ROOT,
        backend=pi.CERTIFICATE_BACKEND_LOCAL,
        status=pi.CA_STATUS_EXPIRED if ended else pi.CA_STATUS_ACTIVE,
        subject=own.subject.rfc4514_string(),
        serial_number=f"{own.serial_number:x}",
        not_before=begun,
        not_after=timestamp(_ns(own.not_valid_after_utc.timestamp())),
        certificates_issued=issued,
        certificates_active=active,
        created_at=begun,
        updated_at=timestamp(authority.signing_since_ns) if authority.signing_since_ns else begun,
    )


def ca_certificate(authority: Authority) -> pi.GetCACertificateResponse:
    own = authority.members[0].certificate
    return pi.GetCACertificateResponse(
        certificate_pem=authority.certificate_pem.decode(),
        serial_number=f"{own.serial_number:x}",
        not_before=timestamp(_ns(own.not_valid_before_utc.timestamp())),
        not_after=timestamp(_ns(own.not_valid_after_utc.timestamp())),
    )


def validation(
    leaf: x509.Certificate, *, expired: bool, revoked: bool, errors: list[str]
) -> pi.CertificateValidation:
    return pi.CertificateValidation(
        valid=not errors,
        expired=expired,
        revoked=revoked,
        not_before=timestamp(_ns(leaf.not_valid_before_utc.timestamp())),
        not_after=timestamp(_ns(leaf.not_valid_after_utc.timestamp())),
        serial_number=f"{leaf.serial_number:x}",
        subject=leaf.subject.rfc4514_string(),
        issuer=leaf.issuer.rfc4514_string(),
        errors=errors,
    )


def certificate_type(said: int) -> CertificateType | None:
    return _known(said, _TYPES_BACK, "type")


def certificate_state(said: int) -> IssuedState | None:
    return _known(said, _STATES_BACK, "status")


def request_state(said: int) -> RequestState | None:
    return _known(said, _REQUESTS_BACK, "status")


def _ns(seconds: float) -> int:
    return round(seconds) * NS


def _known(said: int, table: Mapping[int, T], field: str) -> T | None:
    """None if nothing is said."""
    if not said:
        return None
    try:
        return table[said]
    except KeyError:
        raise InvalidArgument(f"{field} {said} is not known", field=field) from None
