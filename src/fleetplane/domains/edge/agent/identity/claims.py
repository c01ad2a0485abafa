"""What a token says, read without its key: the signature is the server's to verify. Pure."""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from fleetplane.kernel.errors import InvalidArgument

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
