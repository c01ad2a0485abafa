"""The shapes of the certificate authority's answers: its messages of gRPC, spelled as JSON."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import field

from fleetplane.domains.boards.rest.common import BoardShape


class ShownAuthority(BoardShape, frozen=True, kw_only=True):
    id: int
    name: str
    type: str
    backend: str
    status: str
    subject: str
    serial_number: str
    not_before: str | None
    not_after: str | None
    certificates_issued: int
    certificates_active: int
    created_at: str | None
    updated_at: str | None


class InitializedAuthority(BoardShape, frozen=True, kw_only=True):
    success: bool
    message: str
    ca_info: ShownAuthority | None


class AuthorityCertificate(BoardShape, frozen=True, kw_only=True):
    certificate_pem: str
    serial_number: str
    not_before: str | None
    not_after: str | None


class CertificateCounts(BoardShape, frozen=True, kw_only=True):
    total_certificates: int
    active_certificates: int
    expired_certificates: int
    revoked_certificates: int
    certificates_issued_24h: int
    certificates_expiring_30d: int
    ca_info: ShownAuthority | None


class CleanedCertificates(BoardShape, frozen=True, kw_only=True):
    success: bool
    cleaned_count: int
    message: str


class CertificateFields(BoardShape, frozen=True, kw_only=True):
    id: int
    serial_number: str
    common_name: str
    type: str
    status: str
    subject: str
    issuer: str
    not_before: str | None
    not_after: str | None
    sans: str
    """As clients know it: names by kind as JSON in a string, empty if there are none."""
    key_usage: str
    """Separated by commas."""
    ext_key_usage: str
    backend: str
    node_id: int | None
    cluster_id: int | None
    auto_renew: bool
    revoked_at: str | None
    revoked_reason: str | None
    created_at: str | None
    updated_at: str | None


class ShownCertificate(CertificateFields, frozen=True, kw_only=True):
    certificate_pem: str


class CertificateRows(BoardShape, frozen=True, kw_only=True):
    """Certificates that were issued."""

    data: Sequence[ShownCertificate] = field(name="certificates")
    count: int
    total: int
    limit: int
    offset: int


class RevokedCertificate(BoardShape, frozen=True, kw_only=True):
    message: str
    certificate: ShownCertificate


class CheckedCertificate(BoardShape, frozen=True, kw_only=True):
    valid: bool
    expired: bool
    revoked: bool
    not_before: str | None
    not_after: str | None
    serial_number: str
    subject: str
    issuer: str
    errors: Sequence[str]


class ShownRequest(BoardShape, frozen=True, kw_only=True):
    id: int
    common_name: str
    type: str
    status: str
    sans: str
    """As clients know it: an array as JSON in a string, empty if there are none."""
    validity_period: str
    key_usage: str
    """In brackets, separated by commas; empty if none was asked for."""
    ext_key_usage: str
    node_id: int | None
    cluster_id: int | None
    processed_at: str | None
    certificate_id: int | None
    failure_reason: str | None
    created_at: str | None
    updated_at: str | None


class DecidedRequest(ShownRequest, frozen=True, kw_only=True):
    certificate: ShownCertificate | None


class RequestRows(BoardShape, frozen=True, kw_only=True):
    """Requests for certificates."""

    data: Sequence[ShownRequest] = field(name="requests")
    count: int
    total: int
    limit: int
    offset: int
