"""Protobuf to certificates and requests for them, and back. Pure."""

from __future__ import annotations

from typing import Final

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
from fleetplane.domains.boards.wire.message_json import enum_table, filled, known
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.values.timestamps import timestamp

_TYPES: Final = enum_table(CertificateType, pi.CertificateType, "CERTIFICATE_TYPE_")
_STATES: Final = enum_table(IssuedState, pi.CertificateStatus, "CERTIFICATE_STATUS_")
_REQUESTS: Final = enum_table(RequestState, pi.CSRStatus, "CSR_STATUS_")


def state_of(found: Certificate, *, now_ns: int) -> IssuedState:
    if found.status is not None and found.status.revoked_at_ns is not None:
        return IssuedState.REVOKED
    return IssuedState.EXPIRED if found.spec.not_after_ns <= now_ns else IssuedState.ACTIVE


def certificate(found: Certificate, *, now_ns: int) -> pi.Certificate:
    spec, status = found.spec, found.status
    revoked = status is not None and status.revoked_at_ns is not None
    return filled(
        pi.Certificate,
        spec,
        found,
        id=number_of(found),
        serial_number=spec.serial,
        type=_TYPES[CertificateType(spec.purpose)],
        status=_STATES[state_of(found, now_ns=now_ns)],
        backend=pi.CERTIFICATE_BACKEND_LOCAL,
        node_id=spec.board,
        revoked_at=timestamp(status.revoked_at_ns) if status is not None and revoked else None,
        revoked_reason=status.revoked_reason if status is not None and revoked else None,
    )


def request(found: CertificateRequest) -> pi.CertificateRequest:
    spec, status = found.spec, request_status(found)
    return filled(
        pi.CertificateRequest,
        spec,
        status,
        found,
        id=int(found.name),
        type=_TYPES[spec.type],
        status=_REQUESTS[status.state],
        node_id=spec.board,
        certificate_id=status.certificate,
        failure_reason=status.failure_reason or None,
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
    return known(said, _TYPES, "type")


def certificate_state(said: int) -> IssuedState | None:
    return known(said, _STATES, "status")


def request_state(said: int) -> RequestState | None:
    return known(said, _REQUESTS, "status")


def _ns(seconds: float) -> int:
    return round(seconds) * NS
