"""What a registration nonce says, read without its key.

The signature is the server's to verify; the agent only needs to know whom the nonce is for,
which configuration it was made under, and whether asking with it is still of use. Pure.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Final

import msgspec

from fleetplane.kernel.errors import Unauthenticated

NONCE_LIMIT_BYTES: Final = 16 * 1024
"""Real ones have about 700; the file may be anything."""
LEEWAY_SECONDS: Final = 60.0
"""Between the server's clock and ours, before the nonce counts as from the future or as over."""


class BadNonce(Unauthenticated):
    """The nonce file cannot be used to register."""

    reason = "BAD_NONCE"
    hint = "the server that made this instance has to give it a new nonce"


class _Claims(msgspec.Struct):
    sub: str = ""
    kind: str = ""
    config_hash: str = ""
    exp: float | None = None
    nbf: float | None = None
    iat: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Nonce:
    token: str
    subject: str
    config_hash: str
    expires_at: float | None
    """Seconds since the Unix epoch."""


def read_nonce(raw: bytes, *, now: float) -> Nonce:
    """The nonce in this file's bytes, if it can still be used at `now` (seconds since the epoch)."""
    if len(raw) > NONCE_LIMIT_BYTES:
        raise BadNonce(f"the nonce has more than {NONCE_LIMIT_BYTES} bytes")
    try:
        token = raw.decode("ascii").strip()
        header, payload, signature = token.split(".")
        claims = msgspec.json.decode(_unpadded(payload), type=_Claims)
    except (ValueError, binascii.Error, msgspec.DecodeError) as error:
        raise BadNonce(f"the nonce is no JSON web token: {error}") from None
    if not (header and signature):
        raise BadNonce("the nonce is no signed JSON web token")
    _check_times(claims, now)
    return Nonce(token=token, subject=claims.sub, config_hash=claims.config_hash, expires_at=claims.exp)


def _check_times(claims: _Claims, now: float) -> None:
    if claims.exp is not None and now >= claims.exp + LEEWAY_SECONDS:
        raise BadNonce(f"the nonce is over since {now - claims.exp:.0f} s")
    starts = max(claims.nbf or 0.0, claims.iat or 0.0)
    if now < starts - LEEWAY_SECONDS:
        raise BadNonce(
            f"the nonce begins in {starts - now:.0f} s", hint="set this machine's clock, or the server's"
        )


def _unpadded(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
