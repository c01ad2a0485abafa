"""The daemon's key and token, replaced together.

Each signature asks here, so that a renewed token or a rotated key is used from the next message on, on the
stream that is open. A token's claims are read without its key: the server verifies the signature.
"""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.agent.config.document import DaemonConfig
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument

TOKEN_LIMIT_BYTES: Final = 16 * 1024
"""Real ones have about 900; what is given on a command line may be anything."""
KEY_BYTES: Final = 32


class BadToken(InvalidArgument):
    reason = "BAD_TOKEN"
    hint = "ask for a new one where this one was issued"


class DaemonEnrollmentClaims(msgspec.Struct, frozen=True, kw_only=True):
    tid: str
    cep: str
    """Where to enrol, and where to connect afterwards."""
    sub: str = ""
    aud: str | list[str] = ""
    exp: float | None = None
    nbf: float | None = None
    spk: str = ""
    """The server's public key."""
    nid: str = ""
    """The node that the token is for; empty: a new one."""


class DaemonClaims(msgspec.Struct, frozen=True, kw_only=True):
    sub: str
    tid: str = ""
    exp: float | None = None
    iat: float | None = None
    jti: str = ""


T = TypeVar("T", DaemonEnrollmentClaims, DaemonClaims)


def enrollment(token: str) -> DaemonEnrollmentClaims:
    claims = _converted(token, DaemonEnrollmentClaims)
    for name in ("tid", "cep"):
        if not getattr(claims, name).strip():
            raise BadToken(f"the enrollment token lacks the claim {name!r}")
    return claims


def node(token: str) -> DaemonClaims:
    return _converted(token, DaemonClaims)


def server_key(claims: DaemonEnrollmentClaims) -> bytes:
    """The server's key, or nothing if the token does not name it."""
    if not claims.spk:
        return b""
    key = b""
    with suppress(ValueError, binascii.Error):
        key = bytes.fromhex(claims.spk) if len(claims.spk) == 2 * KEY_BYTES else _unpadded(claims.spk)
    if len(key) != KEY_BYTES:
        raise BadToken("the enrollment token names a server key (spk) that is none")
    return key


def _converted(token: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(_payload(token), kind)
    except msgspec.ValidationError as error:
        raise BadToken(f"the token lacks something: {error}") from None


def _payload(token: str) -> dict[str, object]:
    if len(token) > TOKEN_LIMIT_BYTES:
        raise BadToken(f"the token has more than {TOKEN_LIMIT_BYTES} characters")
    try:
        header, payload, signature = token.split(".")
        claims = msgspec.json.decode(_unpadded(payload), type=dict[str, object])
    except (ValueError, binascii.Error, msgspec.DecodeError) as error:
        raise BadToken(f"the token is no JSON web token: {error}") from None
    if not (header and signature):
        raise BadToken("the token is not signed")
    return claims


def _unpadded(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)


LEAST_MARGIN_SECONDS: Final = 120.0
MARGIN_SHARE: Final = 0.25
"""A token is renewed in the last quarter of its life: one of an hour has 15 minutes to find its server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonIdentity:
    node_id: str
    tenant: str
    key: Ed25519PrivateKey = field(repr=False)
    token: str = field(repr=False)

    @property
    def expires_at(self) -> float | None:
        """Seconds since the Unix epoch; None for a token that does not say."""
        return node(self.token).exp

    def renew_at(self) -> float | None:
        said = node(self.token)
        if said.exp is None:
            return None
        margin = LEAST_MARGIN_SECONDS
        if said.iat is not None and said.exp > said.iat:
            life = said.exp - said.iat
            margin = min(
                max(margin, life * MARGIN_SHARE), life / 2
            )  # a token of seconds is not renewed at once
        return said.exp - margin


def load(folder: StateFolder, config: DaemonConfig) -> DaemonIdentity:
    """Blocking."""
    token = folder.load_token()
    said = node(token)
    tenant = said.tid or config.edge.tenant_id
    if config.spec.node.id and said.sub != config.spec.node.id.lower():
        raise FailedPrecondition(
            f"{folder.token} is of node {said.sub}, and spec.node.id is {config.spec.node.id}",
            hint="enrol this machine anew",
        )
    if (stated := config.edge.tenant_id) and tenant != stated:
        raise FailedPrecondition(
            f"{folder.token} is of tenant {tenant!r}, and spec.cluster.edge.tenant_id is {stated!r}",
            hint="enrol this machine anew",
        )
    return DaemonIdentity(node_id=said.sub, tenant=tenant, key=folder.load_key(), token=token)


class Keyring:
    """The identity in force."""

    def __init__(self, current: DaemonIdentity, seen: tuple[tuple[int, int], ...] = ()) -> None:
        self.current = current
        self.seen = seen
        """Of the files it was read from."""

    def __repr__(self) -> str:
        return f"<Keyring of {self.current.node_id}>"
