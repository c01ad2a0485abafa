"""Who an agent or operator is: its certificate, the key behind it and the nonce before it.

A client's certificate carries its id as common name, its tenant as the one organisation, and
its role in an extension. Certificates of agents live long by default: agents of the first
generations cannot renew them, and one that cannot come back is replaced for nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import StrEnum

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fleetplane.kernel.access import Principal
from fleetplane.kernel.access import Role as AccessRole
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import Authority, IssuedCertificate
from fleetplane.kernel.identity.certificates import peer_identity, printable_extension
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.rpc import Authenticator, Connection

TLS_1_3 = 0x0304
ROLE_OID = "1.3.6.1.4.1.999999.1"
DEFAULT_LIFE_HOURS = 8760.0  # a year: longer than any forced expiry that makes sense
OPERATOR_LIFE_HOURS = 24.0  # operators renew at half of it; one that is lost is soon worth nothing
NONCE_ISSUER = "nstance-server"
NONCE_BACKDATE_SECONDS = 30.0  # an agent checks the times against its own clock, which may lag
PUBLIC_KEY_LIMIT_BYTES = 4096
TENANT_PREFIX = "tenant/"

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


class ClientRole(StrEnum):
    AGENT = "agent"
    OPERATOR = "operator"


def authenticator(role: ClientRole, revocations: Revocations, authority: Authority) -> Authenticator:
    """Who presents this certificate, if it may use a listener for `role`.

    That some authority of ours has signed it was seen when the connection was made, which may be long
    ago; that it is still trusted is seen with every call.
    """

    def authenticate(connection: Connection) -> Principal:
        require_tls13(connection)
        identity = peer_identity(connection.certificates)
        have = identity.extension_text(ROLE_OID)
        if not identity.common_name or len(identity.organizations) != 1 or not have:
            raise Unauthenticated("the client certificate lacks a common name, one organisation or a role")
        if not authority.accepts(identity.issuer_key_id):
            raise Unauthenticated(
                "the authority of the client certificate is not trusted any more",
                hint="enrol again",
                details={"cause": "retired authority"},
            )
        if have != role:
            raise PermissionDenied(f"insufficient permissions: required role {role}, have role {have}")
        name = principal_name(role, identity.organizations[0], identity.common_name)
        revocations.check(serial=identity.serial, principal=name)
        return Principal(
            name=name, roles=frozenset({AccessRole(role)}), scope=f"tenant/{identity.organizations[0]}"
        )

    return authenticate


def anonymous(connection: Connection) -> Principal:
    """Anyone, over TLS 1.3: who registers has nothing to show yet."""
    require_tls13(connection)
    return Principal(name="anonymous", roles=frozenset())


def require_tls13(connection: Connection) -> None:
    if connection.tls_version is not None and connection.tls_version < TLS_1_3:
        raise Unauthenticated("TLS 1.3 is required")


def principal_name(role: ClientRole, tenant: str, client: str) -> str:
    return f"{role}/{tenant}/{client}"


def client_of(principal: Principal) -> tuple[str, str]:
    """The tenant and id that a principal's certificate named, or that its token acts for."""
    if not has_certificate(principal):
        return principal.scope.removeprefix(TENANT_PREFIX), principal.name
    _, tenant, client = principal.name.split("/", 2)
    return tenant, client


def has_certificate(principal: Principal) -> bool:
    """Whether a principal showed a certificate of ours, and not a token."""
    role, _, rest = principal.name.partition("/")
    return role in set(ClientRole) and "/" in rest


def with_tokens(
    certified: Authenticator, door: Callable[[str | None], Principal], *, tenant_header: str
) -> Authenticator:
    """Also whoever shows a token, with what they hold at the tenant that they name."""

    def authenticate(connection: Connection) -> Principal:
        if connection.certificates or connection.authorization is None:
            return certified(connection)
        require_tls13(connection)
        principal = door(connection.authorization)
        named = connection.metadata(tenant_header)
        tenant = named.strip() if isinstance(named, str) else ""
        if not tenant:
            tenant = principal.scope.removeprefix(TENANT_PREFIX)
        if not tenant or "/" in tenant:
            raise InvalidArgument(
                "name the tenant that you act for, in this field of the metadata", field=tenant_header
            )
        return principal.at(TENANT_PREFIX + tenant)

    return authenticate


def load_public_key(text: bytes, *, field: str) -> PublicKey:
    """A public key as PEM, or as base64 of its DER form."""
    if not text:
        raise InvalidArgument(f"{field} is required", field=field)
    if len(text) > PUBLIC_KEY_LIMIT_BYTES:
        raise InvalidArgument(f"{field} is longer than {PUBLIC_KEY_LIMIT_BYTES} bytes", field=field)
    try:
        if b"-----BEGIN" in text:
            key = serialization.load_pem_public_key(text)
        else:
            key = serialization.load_der_public_key(base64.b64decode(text, validate=True))
    except (ValueError, binascii.Error, UnsupportedAlgorithm) as error:
        raise InvalidArgument(f"{field} is no public key", field=field) from error
    if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise InvalidArgument(f"{field}: only Ed25519 and P-256 keys are accepted", field=field)
    return key


def key_pem(key: PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def key_digest(key: PublicKey) -> str:
    return digest(
        key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def issue(
    authority: Authority,
    key: PublicKey,
    *,
    role: ClientRole,
    tenant: str,
    client: str,
    life_hours: float,
    serial: int,
) -> IssuedCertificate:
    return authority.issue_client(
        key,
        name=client,
        organization=tenant,
        life=timedelta(hours=life_hours),
        extensions=[printable_extension(ROLE_OID, role)],
        uris=False,
        serial=serial,
    )


def sign_nonce(
    keys: SigningKeys, *, role: ClientRole, subject: str, life_seconds: float, claims: Mapping[str, object]
) -> str:
    return keys.sign(
        {"iss": NONCE_ISSUER, "sub": subject, "kind": str(role), **claims},
        life_seconds=life_seconds,
        backdate_seconds=NONCE_BACKDATE_SECONDS,
    )


def nonce_fits(nonce: str, claims: Mapping[str, str], *, nonce_id: str, nonce_digest: str) -> bool:
    """Whether a nonce that was verified is the one that was meant for a record.

    Its id tells. The text alone would not: asked for again after the key was replaced, the same nonce
    is signed with another key.
    """
    return digest(nonce) == nonce_digest or (nonce_id != "" and claims.get("jti") == nonce_id)


def read_nonce(keys: SigningKeys, nonce: str, *, role: ClientRole) -> dict[str, str]:
    """The nonce's claims, or Unauthenticated: signature and times, then kind, then what must be there."""
    try:
        claims = keys.verify(nonce)
    except Unauthenticated as error:
        raise Unauthenticated(
            f"invalid registration nonce: {error.message}", details=error.details
        ) from error
    if claims.get("kind") != role:
        raise Unauthenticated(f"invalid registration nonce: it is not for an {role}")
    for name in ("sub", "cluster_id", "tenant"):
        if not claims.get(name):
            raise Unauthenticated(f"invalid registration nonce: {name} is missing")
    return {name: value for name, value in claims.items() if isinstance(value, str)}
