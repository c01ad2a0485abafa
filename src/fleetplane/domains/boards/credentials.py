"""Certificates of boards and of other servers: what stands in them, and who presents one.

A board's certificate names its number in a URI and, for those who call it, in a host name that no
board can choose. It names no address: whoever could have any address certified could pose as this
server. Nothing here is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from fleetplane.domains.boards.access import (
    AGENT,
    CERTIFIED_ROLES,
    CONTROLLER,
    OPERATOR_ROLES,
    PLAIN_AGENT,
)
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.kernel.access import Principal, Role, covers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import Authority, CertificateIdentity, Issued, LeafProfile, LeafUsage
from fleetplane.kernel.identity.authority import URI_ROLE, PublicKey
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.rpc import Connection

CSR_LIMIT_BYTES = 16 * 1024
CSRS_REMEMBERED = 256
URI_NODE = "fleetplane://boards/node/"
URI_CONTROLLER = "fleetplane://boards/controller/"
_BOARD, _CONTROLLER = "board/", "board-controller/"


def host_of(board: int) -> str:
    """The name in a board's certificate, for whoever calls its agent, at whatever address."""
    return f"board-{board}.boards.fleetplane.internal"


def principal_of(board: int) -> str:
    return f"{_BOARD}{board}"


def board_of(principal: Principal) -> int | None:
    """The number in the certificate; None for those who are no board."""
    name = principal.name
    return int(name[len(_BOARD) :]) if name.startswith(_BOARD) and AGENT in principal.roles else None


# Keys and certificates.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenKey:
    """A public key whose owner has shown to hold the private half."""

    key: PublicKey
    digest: str


@lru_cache(maxsize=CSRS_REMEMBERED)  # a board that waits for approval asks again and again
def proven_key(csr_pem: str) -> ProvenKey:
    """The key of a certificate request that is signed with it; names in the request do not count."""
    if not csr_pem:
        raise InvalidArgument("csr_pem is required", field="csr_pem")
    if len(csr_pem) > CSR_LIMIT_BYTES:
        raise InvalidArgument(f"csr_pem is longer than {CSR_LIMIT_BYTES} bytes", field="csr_pem")
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        key = request.public_key()
        signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidArgument("csr_pem is no certificate request in PEM", field="csr_pem") from error
    if not signed:
        raise InvalidArgument("csr_pem is not signed by the key that it names", field="csr_pem")
    if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey):
        raise InvalidArgument("csr_pem: only P-256 and Ed25519 keys are accepted", field="csr_pem")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return ProvenKey(key=key, digest=digest(der))


def issue_to_board(authority: Authority, key: PublicKey, board: int, *, days: float) -> Issued:
    """For a key with which a board both calls this server and answers on its own port."""
    profile = LeafProfile(
        usage=LeafUsage.CLIENT,
        also=LeafUsage.SERVER,
        common_name=f"board-{board}",
        dns=(host_of(board),),
        uri=(URI_ROLE + AGENT, f"{URI_NODE}{board}"),
        ttl_hours=days * 24,
    )
    return authority.issue_leaf(key, profile)


def issue_to_controller(authority: Authority, key: PublicKey, name: str, *, days: float) -> Issued:
    profile = LeafProfile(
        usage=LeafUsage.CLIENT,
        common_name=name,
        uri=(URI_ROLE + CONTROLLER, URI_CONTROLLER + name),
        ttl_hours=days * 24,
    )
    return authority.issue_leaf(key, profile)


def issue_to_self(authority: Authority, name: str, *, days: float) -> tuple[bytes, bytes]:
    """A certificate and its key, for this server's own calls to boards; the key is kept nowhere."""
    key = ec.generate_private_key(ec.SECP256R1())
    issued = issue_to_controller(authority, key.public_key(), name, days=days)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return issued.certificate_pem, pem


def fingerprint(authority: Authority) -> str:
    """Of the authority that signs now, as it stands in join tokens."""
    return digest(authority.members[0].certificate.public_bytes(serialization.Encoding.DER))


# Who is calling.


class Doorkeeper:
    """The authenticators of the listener for boards."""

    def __init__(
        self,
        *,
        authority: Authority,
        revocations: Revocations,
        operators: Operators,
        clock: Clock,
        is_known: Callable[[int], bool],
    ) -> None:
        """`is_known` says whether there is such a board: its certificate outlives it."""
        self._authority = authority
        self._revocations = revocations
        self._operators = operators
        self._clock = clock
        self._is_known = is_known

    def certificate(self, connection: Connection) -> Principal:
        """Whoever presents a certificate of ours; operators may come with a token instead."""
        if connection.certificates or connection.authorization is None:
            return self._certified(connection)
        principal = self._operators.of_header(connection.authorization)
        self._revocations.check(principal=principal.name)
        if not covers(principal.scope, SCOPE):
            raise PermissionDenied(f"the token is for {principal.scope}, not for {SCOPE}")
        return principal

    def anyone(self, connection: Connection) -> Principal:
        """The same if a certificate is there; for the one method that must do without."""
        if connection.certificates:
            return self._certified(connection)
        return Principal(name="anonymous", roles=frozenset())

    def _certified(self, connection: Connection) -> Principal:
        identity = peer_identity(connection.certificates)
        if not self._authority.accepts(identity.issuer_key_id):
            raise Unauthenticated("the authority of this certificate is trusted no more")
        if identity.not_after <= datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC):
            raise Unauthenticated("the certificate has expired", details={"cause": "expired"})
        principal = principal_in(identity)
        self._revocations.check(serial=identity.serial, principal=principal.name)
        board = board_of(principal)
        if board is not None and not self._is_known(board):
            raise Unauthenticated(f"board {board} is not known any more", details={"cause": "deleted"})
        return principal


def principal_in(identity: CertificateIdentity) -> Principal:
    """What a certificate says of its holder; refuses one that was made for something else."""
    said = {uri.removeprefix(URI_ROLE) for uri in identity.uris if uri.startswith(URI_ROLE)}
    roles = frozenset(Role(role) for role in said) & CERTIFIED_ROLES
    if len(roles) != 1:
        raise PermissionDenied("the certificate is not one for boards", details={"cause": "role"})
    (role,) = roles
    if role == AGENT:
        number = _one(identity, URI_NODE)
        if not (number.isascii() and number.isdecimal()):
            raise Unauthenticated("the certificate does not say which board it is of")
        return Principal(name=f"{_BOARD}{int(number)}", roles=roles)
    if role == CONTROLLER:
        return Principal(name=_CONTROLLER + _one(identity, URI_CONTROLLER), roles=roles)
    assert role in OPERATOR_ROLES
    if not identity.common_name:
        raise Unauthenticated("the certificate has no common name")
    return Principal(name=f"operator/{identity.common_name}", roles=roles)


def _one(identity: CertificateIdentity, prefix: str) -> str:
    found = [uri.removeprefix(prefix) for uri in identity.uris if uri.startswith(prefix)]
    if len(found) != 1 or not found[0]:
        raise Unauthenticated(f"the certificate needs exactly one name that begins with {prefix}")
    return found[0]


def presented(connection: Connection) -> CertificateIdentity | None:
    """The certificate that the connection was made with."""
    return peer_identity(connection.certificates) if connection.certificates else None


def plain(connection: Connection) -> Principal:
    """Whoever reaches the listener without TLS: an agent that cannot say who it is."""
    return Principal(name=f"board-plain/{connection.address}", roles=frozenset({PLAIN_AGENT}))
