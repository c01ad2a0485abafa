"""Refresh tokens in two shapes: signed, which stay the same, and rotating, which are good once.

- `SignedRefresh`: a signed token that stays the same for as long as the login lasts.
- `RotatingRefresh`: carries the login's id and a generation under a MAC; see `Logins.refresh` for what a
  generation that was used before means.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import uuid
from collections.abc import Mapping
from typing import Protocol

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.master_key import SealedSecret
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.store import Store

REFRESH = "refresh"
ACTOR = "system"
_KEY_BYTES = 32


def refused() -> Unauthenticated:
    return Unauthenticated("the refresh token is unknown, expired, used or revoked")


class RefreshTokens(Protocol):
    """How refresh tokens are made and read."""

    rotates: bool

    def issue(self, login: str, generation: int, claims: Mapping[str, object]) -> str: ...

    def read(self, token: str) -> tuple[str, int]:
        """The login's id and the generation; raises where the token is not one of ours."""
        ...


class SignedRefresh:
    """Refresh tokens that stay the same: known clients keep the one they were given."""

    rotates = False

    def __init__(self, keys: SigningKeys, *, audience: str, life_seconds: float) -> None:
        self._keys = keys
        self._audience = audience
        self._life_seconds = life_seconds

    def issue(self, login: str, generation: int, claims: Mapping[str, object]) -> str:  # noqa: ARG002  # one signature
        signed = {**claims, "token_type": REFRESH, "sid": login}
        return self._keys.sign(signed, life_seconds=self._life_seconds)

    def read(self, token: str) -> tuple[str, int]:
        try:
            claims = self._keys.verify(token, audience=self._audience)
        except Unauthenticated as error:
            raise Unauthenticated(
                f"the refresh token is not good: {error.message}", details=error.details
            ) from error
        if claims.get("token_type") != REFRESH:
            raise InvalidArgument("is no refresh token", field="refresh_token")
        return str(claims.get("sid")), 1


class RotatingRefresh:
    """Refresh tokens that are good once: 16 bytes of login id, 4 of generation, 32 of MAC."""

    rotates = True

    def __init__(self, mac_key: bytes) -> None:
        self._mac_key = mac_key

    @classmethod
    async def load_or_create(
        cls, store: Store, master: MasterKey, clock: Clock, *, secret: str
    ) -> RotatingRefresh:
        """The key of refresh tokens, made at first use: by one of all servers."""

        async def made() -> bytes:
            return clock.token_bytes(_KEY_BYTES)

        found = await SealedSecret(store, master, name=secret).read_or_make(made, actor=ACTOR)
        return cls(found.content)

    def issue(self, login: str, generation: int, claims: Mapping[str, object]) -> str:  # noqa: ARG002  # one signature
        head = uuid.UUID(login).bytes + generation.to_bytes(4, "big")
        return base64.urlsafe_b64encode(head + self._mac(head)).rstrip(b"=").decode()

    def read(self, token: str) -> tuple[str, int]:
        try:
            raw = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        except (ValueError, binascii.Error) as error:
            raise refused() from error
        head, mac = raw[:20], raw[20:]
        if len(raw) != 52 or not hmac.compare_digest(mac, self._mac(head)):
            raise refused()
        return str(uuid.UUID(bytes=head[:16])), int.from_bytes(head[16:], "big")

    def _mac(self, head: bytes) -> bytes:
        return hmac.digest(self._mac_key, head, hashlib.sha256)
