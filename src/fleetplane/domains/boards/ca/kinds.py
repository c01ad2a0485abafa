"""Requests for certificates, as they are kept until somebody decides about them, and after."""

from __future__ import annotations

from enum import StrEnum

from fleetplane.domains.boards.kinds import BoardsSpec
from fleetplane.kernel.resources import Kind, Resource


class CertificateType(StrEnum):
    CA = "ca"
    SERVER = "server"
    CLIENT = "client"
    SSH = "ssh"
    INTERMEDIATE = "intermediate"


class IssuedState(StrEnum):
    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"
    PENDING = "pending"
    FAILED = "failed"
    RENEWING = "renewing"


class RequestState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"
    FAILED = "failed"


class RequestSpec(BoardsSpec, frozen=True):
    """What somebody wants certified. The key is theirs, and the request signed with it."""

    common_name: str
    type: CertificateType
    csr_pem: str
    requested_by: str
    sans: tuple[str, ...] = ()
    validity_seconds: float = 0.0
    validity_period: str = ""
    """As it was said."""
    key_usage: tuple[str, ...] = ()
    ext_key_usage: tuple[str, ...] = ()
    board: int | None = None
    cluster_id: int | None = None


class RequestStatus(BoardsSpec, frozen=True):
    state: RequestState = RequestState.PENDING
    processed_at_ns: int | None = None
    processed_by: str = ""
    certificate: int | None = None
    failure_reason: str = ""


CertificateRequest = Resource[RequestSpec, RequestStatus]
CERTIFICATE_REQUEST: Kind[RequestSpec, RequestStatus] = Kind(
    "board-certificate-request", RequestSpec, RequestStatus
)


def request_status(request: CertificateRequest) -> RequestStatus:
    assert request.status is not None, "a request is never put without a status"
    return request.status
