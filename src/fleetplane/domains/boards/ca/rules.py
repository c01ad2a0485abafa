"""Requests for certificates as they are stored, and the rules for what a certificate may hold. Pure.

The authority is the same that issues certificates of boards and of this server. So nobody gets a name with
which to pose as one of them: no address, no host name outside the configured domains, and no URI but the role
of an operator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from fleetplane.domains.boards.access import OPERATOR_ROLES
from fleetplane.domains.boards.kinds import BoardsSpec
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied, Unimplemented
from fleetplane.kernel.identity import LeafProfile, LeafUsage
from fleetplane.kernel.identity.authority import URI_ROLE
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


DOMAINS: Final = ("pi-controller.local", "cluster.local")
"""Under which servers' names are certified, unless other domains are set."""
NAME_LIMIT: Final = 64
"""Of a common name: what X.509 has room for."""
SANS_LIMIT: Final = 32
SAN_LIMIT: Final = 253
USAGES_LIMIT: Final = 16
VALIDITY_SECONDS: Final = 8760 * 3600.0
VALIDITY_LIMIT_SECONDS: Final = 397 * 86_400.0
OPERATOR_SECONDS: Final = 86_400.0
"""Of a certificate with an operator's role, at most and by default: its holder renews it every day, and
one that is lost is soon worth nothing, even at a board that cannot be told of its revocation."""
SHORTEST_SECONDS: Final = 60.0

_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PERIOD: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|ms|h|m|s)")
_HOST: Final = re.compile(
    r"(?:\*\.)?[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*"
)
_KEY_USAGES: Final = frozenset({"digital_signature", "key_encipherment"})
_EXTENDED: Final = {"server_auth": LeafUsage.SERVER, "client_auth": LeafUsage.CLIENT}
_ISSUED: Final = {CertificateType.SERVER: LeafUsage.SERVER, CertificateType.CLIENT: LeafUsage.CLIENT}
_ROLES: Final = frozenset(URI_ROLE + role for role in OPERATOR_ROLES)


def validity_seconds(text: str) -> float:
    """The seconds of a period such as `8760h` or `1h30m`; 0 for an empty text."""
    if not text:
        return 0.0
    parts = _PERIOD.findall(text[:64])
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InvalidArgument("validity_period is no period such as 720h", field="validity_period")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not SHORTEST_SECONDS <= seconds <= VALIDITY_LIMIT_SECONDS:
        raise InvalidArgument(
            f"validity_period must be one minute to {VALIDITY_LIMIT_SECONDS / 86_400:g} days",
            field="validity_period",
        )
    return seconds


def checked(spec: RequestSpec, domains: Sequence[str] = DOMAINS) -> RequestSpec:
    """The request, or the error that names its field."""
    check_type(spec.type)
    name = spec.common_name
    if not name.strip() or len(name) > NAME_LIMIT or not name.isprintable():
        raise InvalidArgument(f"common_name must have 1 to {NAME_LIMIT} characters", field="common_name")
    if len(spec.sans) > SANS_LIMIT:
        raise InvalidArgument(f"more than {SANS_LIMIT} names", field="sans")
    _check_words("key_usage", spec.key_usage, _KEY_USAGES)
    _check_words("ext_key_usage", spec.ext_key_usage, _EXTENDED)
    if _is_operators(spec) and spec.validity_seconds > OPERATOR_SECONDS:
        raise InvalidArgument(
            f"the certificate of an operator lives at most {OPERATOR_SECONDS / 3600:g}h",
            field="validity_period",
            hint="ask for 24h or less; its holder renews it every day",
        )
    profile(spec, domains)
    return spec


def _is_operators(spec: RequestSpec) -> bool:
    return any(san in _ROLES for san in spec.sans)


def _life_seconds(spec: RequestSpec) -> float:
    """As asked for; for an operator a day at most, also where an older certificate is renewed."""
    if _is_operators(spec):
        return min(spec.validity_seconds or OPERATOR_SECONDS, OPERATOR_SECONDS)
    return spec.validity_seconds or VALIDITY_SECONDS


def check_type(kind: CertificateType) -> None:
    if kind not in _ISSUED:
        raise Unimplemented(
            f"this authority issues certificates for clients and servers, none of type {kind}"
        )


def profile(spec: RequestSpec, domains: Sequence[str] = DOMAINS) -> LeafProfile:
    """What is to stand in the certificate."""
    roles = tuple(san for san in spec.sans if san in _ROLES)
    hosts = tuple(san.lower() for san in spec.sans if san not in _ROLES)
    if spec.type is CertificateType.SERVER:
        hosts = _servers(spec.common_name, hosts)
        if roles:
            raise PermissionDenied("a server's certificate carries no role", field="sans")
    if len(roles) > 1:
        raise InvalidArgument("a certificate carries one role at most", field="sans")
    for host in hosts:
        _check_host(host, domains)
    usages = list(dict.fromkeys(_EXTENDED[word] for word in spec.ext_key_usage))
    first = _ISSUED[spec.type]
    return LeafProfile(
        usage=first,
        also=next((usage for usage in usages if usage is not first), None),
        common_name=spec.common_name,
        dns=hosts,
        uri=roles,
        ttl_hours=_life_seconds(spec) / 3600.0,
    )


def _servers(common_name: str, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Clients look at the alternative names only: a server's own name has to be among them."""
    name = common_name.lower()
    return hosts if name in hosts or not _HOST.fullmatch(name) else (name, *hosts)


def _check_host(host: str, domains: Sequence[str]) -> None:
    if len(host) > SAN_LIMIT or not _HOST.fullmatch(host):
        raise PermissionDenied(
            f"{host[:64]!r} is not certified: only host names are, and roles of operators", field="sans"
        )
    if not any(host.removeprefix("*.").endswith("." + domain) for domain in domains):
        raise PermissionDenied(
            f"{host!r} is in none of the domains that are certified: {', '.join(domains)}", field="sans"
        )


def _check_words(field: str, words: Sequence[str], known: Iterable[str]) -> None:
    if len(words) > USAGES_LIMIT:
        raise InvalidArgument(f"more than {USAGES_LIMIT} usages", field=field)
    for word in words:
        if word not in known:
            raise InvalidArgument(
                f"{field} {word[:32]!r} is not one of {', '.join(sorted(known))}", field=field
            )
