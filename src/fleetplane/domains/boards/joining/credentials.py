"""Certificates of boards and of other servers, and the roles of callers in this domain.

A board's certificate names its number in a URI and, for those who call it, in a host name that no
board can choose. It names no address: a board that could have any address certified could pose as this
server. Nothing here is stored. Apart from `access`, which a board's agent loads too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fleetplane.domains.boards.access import (
    ADMIN,
    AGENT,
    CERTIFIED_ROLES,
    CONTROLLER,
    OPERATOR,
    OPERATOR_ROLES,
    PLAIN_AGENT,
    VIEWER,
)
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.fleet.people.door import Authenticators
from fleetplane.kernel import access as built_in
from fleetplane.kernel.access import Principal, Role, covers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import (
    Authority,
    CertificateIdentity,
    IssuedCertificate,
    LeafProfile,
    LeafUsage,
)
from fleetplane.kernel.identity.authority import URI_ROLE, PublicKey
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.identity.enrolment import digest
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.rpc import Connection

_SAME = {
    built_in.VIEWER: VIEWER,
    built_in.OPERATOR: OPERATOR,
    built_in.ADMIN: ADMIN,
    built_in.OWNER: ADMIN,
}
"""What the built-in roles are with boards."""


def as_board_caller(principal: Principal) -> Principal:
    """A principal with the roles that it holds where boards lie, in the words of this domain."""
    here = principal.at(SCOPE)
    return replace(here, roles=here.roles | {_SAME[role] for role in here.roles if role in _SAME})


URI_NODE = "fleetplane://boards/node/"
URI_CONTROLLER = "fleetplane://boards/controller/"
_BOARD, _CONTROLLER = "board/", "board-controller/"


def host_of(board: int) -> str:
    """The DNS name in a board's certificate, which callers of its agent verify at any address."""
    return f"board-{board}.boards.fleetplane.internal"


def principal_of(board: int) -> str:
    return f"{_BOARD}{board}"


def board_of(principal: Principal) -> int | None:
    """The number in the certificate; None for those who are no board."""
    name = principal.name
    return int(name[len(_BOARD) :]) if name.startswith(_BOARD) and AGENT in principal.roles else None


# Keys and certificates.


def issue_to_board(authority: Authority, key: PublicKey, board: int, *, days: float) -> IssuedCertificate:
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


def issue_to_controller(authority: Authority, key: PublicKey, name: str, *, days: float) -> IssuedCertificate:
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
    """The fingerprint of the signing authority, as join tokens carry it."""
    return digest(authority.members[0].certificate.public_bytes(serialization.Encoding.DER))


# Who is calling.


@dataclass(kw_only=True, slots=True, eq=False, repr=False)
class Doorkeeper:
    """The authenticators of the listener for boards."""

    authority: Authority
    revocations: Revocations
    door: Authenticators
    clock: Clock
    is_known: Callable[[int], bool]
    """Whether there is such a board: its certificate outlives it."""

    def certificate(self, connection: Connection) -> Principal:
        """The principal of a client certificate of this authority, or of whom the door recognises."""
        if connection.certificates or connection.authorization is None:
            return self._certified(connection)
        principal = self.door.of_header(connection.authorization)
        here = as_board_caller(principal)
        if not here.roles and not covers(principal.scope, SCOPE):
            raise PermissionDenied(f"the token is for {principal.scope}, not for {SCOPE}")
        return here

    def anyone(self, connection: Connection) -> Principal:
        """As `certificate`, but admits callers without one, for the one method that allows that."""
        if connection.certificates:
            return self._certified(connection)
        return Principal(name="anonymous", roles=frozenset())

    def _certified(self, connection: Connection) -> Principal:
        identity = peer_identity(connection.certificates)
        if not self.authority.accepts(identity.issuer_key_id):
            raise Unauthenticated("the authority of this certificate is trusted no more")
        if identity.not_after <= datetime.fromtimestamp(self.clock.now_ns() / 1e9, UTC):
            raise Unauthenticated("the certificate has expired", details={"cause": "expired"})
        principal = principal_in(identity)
        self.revocations.check(serial=identity.serial, principal=principal.name)
        board = board_of(principal)
        if board is not None and not self.is_known(board):
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
            raise Unauthenticated("the certificate names no board")
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
    """The principal of a caller on the listener without TLS, whose identity is unknown."""
    return Principal(name=f"board-plain/{connection.address}", roles=frozenset({PLAIN_AGENT}))
