"""Logins: access tokens that live an hour, refresh tokens that are good once.

A login is a session. Its refresh token carries the session's id and a generation, under a MAC
of ours; the session remembers which generation is good. Refreshing moves to the next one in a
transaction, so of two who refresh at once one wins. An older generation under a good MAC was
stolen or replayed, and ends the session. Nothing that opens a session is stored.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fleetplane.domains.proxies.kinds import (
    ID_CLAIM,
    SESSION,
    USER,
    SessionSpec,
    SessionStatus,
    User,
    user_scope,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store
from fleetplane.web.paging import in_order

ACCESS_SECONDS = 3600
IDLE_SECONDS = 30 * 86_400
LONGEST_SECONDS = 90 * 86_400
SESSIONS_LIMIT = 100
"""Per user; a further login ends the oldest."""
VERIFIED_LIMIT = 10_000
"""Access tokens whose signature is known to be good; about 1 KB each."""
ISSUER = "fleetplane"
AUDIENCE = "fleetplane/proxies"
NS = 1_000_000_000
_MAC_SECRET = "proxies/refresh-key"  # noqa: S105  # its name
_KEY_BYTES = 32


class TokenPair(msgspec.Struct, frozen=True, kw_only=True):
    access_token: str
    refresh_token: str
    expires_in: int = ACCESS_SECONDS
    token_type: str = "Bearer"  # noqa: S105  # its kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    user: str
    session: str
    expires_at_ns: int


class Sessions:
    """See `load_or_create`; the constructor takes what has been loaded."""

    def __init__(self, store: Store, clock: Clock, keys: SigningKeys, mac_key: bytes) -> None:
        self._store = store
        self._clock = clock
        self._keys = keys
        self._mac_key = mac_key
        self._verified: OrderedDict[str, Verified] = OrderedDict()

    @classmethod
    async def load_or_create(cls, store: Store, master: MasterKey, clock: Clock) -> Sessions:
        keys = await SigningKeys.load_or_create(
            store,
            master,
            clock,
            purpose="proxies/access",
            algorithm="RS256",
            longest_life_seconds=float(ACCESS_SECONDS),
        )
        sealed = await store.get_secret(_MAC_SECRET)
        if sealed is None:
            mac_key = clock.token_bytes(_KEY_BYTES)
            await store.put_secret(_MAC_SECRET, master.seal(mac_key, purpose=_MAC_SECRET))
        else:
            mac_key = master.open(sealed, purpose=_MAC_SECRET)
        return cls(store, clock, keys, mac_key)

    def jwks(self) -> dict[str, list[dict[str, str]]]:
        return self._keys.jwks()

    def key_age_seconds(self) -> float:
        """Of the key that signs."""
        return (self._clock.now_ns() - self._keys.created_at_ns) / NS

    async def rotate_keys(self, *, actor: str) -> str:
        """Sign with a new key; tokens of the old one stay good for as long as they live."""
        return await self._keys.rotate(actor=actor)

    # Access tokens.

    def verify(self, token: str) -> Verified:
        """Whose access token it is, if it is good and its session has not ended."""
        verified = self._verified.get(token)
        if verified is None:
            claims = self._keys.verify(token, audience=AUDIENCE)
            if claims.get("iss") != ISSUER:
                raise Unauthenticated("the token was not issued here")
            verified = Verified(
                user=str(claims.get("sub")),
                session=str(claims.get("sid")),
                expires_at_ns=int(str(claims["exp"])) * NS,
            )
            self._verified[token] = verified
            if len(self._verified) > VERIFIED_LIMIT:
                self._verified.popitem(last=False)
        if verified.expires_at_ns <= self._clock.now_ns():
            self._verified.pop(token, None)
            raise Unauthenticated("the token has expired")
        if self._store.get(SESSION, user_scope(verified.user), verified.session) is None:
            raise Unauthenticated("the session has ended")
        return verified

    def _pair(self, user: str, session: str, generation: int) -> TokenPair:
        access = self._keys.sign(
            {"iss": ISSUER, "aud": AUDIENCE, "sub": user, "sid": session}, life_seconds=ACCESS_SECONDS
        )
        return TokenPair(access_token=access, refresh_token=self._refresh_token(session, generation))

    # Sessions.

    async def open(
        self, user: User, *, actor: str, still_good: Callable[[Draft], bool] = lambda _: True
    ) -> TokenPair:
        """`still_good` says, at the last moment, whether the user may be let in."""
        session = str(uuid.UUID(bytes=self._clock.token_bytes(16), version=4))
        scope = user_scope(user.name)
        older = in_order(self._store.list(SESSION, scope))
        surplus = [one.name for one in older[: max(0, len(older) + 1 - SESSIONS_LIMIT)]]

        def change(draft: Draft) -> None:
            if not still_good(draft):
                raise Unauthenticated("the e-mail or the password is wrong")
            for name in surplus:
                _end(draft, scope, name)
            spec = SessionSpec(user=user.name, expires_at_ns=draft.now_ns + LONGEST_SECONDS * NS)
            status = SessionStatus(generation=1, idle_expires_at_ns=draft.now_ns + IDLE_SECONDS * NS)
            draft.claim(SESSION, "", ID_CLAIM, session, scope)
            draft.put(SESSION, scope, session, spec=spec, status=status)

        keys = [SESSION.key(scope, name) for name in (session, *surplus)]
        await self._store.transact(change, actor=actor, action="auth.login", touches=keys)
        return self._pair(user.name, session, 1)

    async def refresh(self, token: str, *, actor: str) -> TokenPair:
        """The next pair. A refresh token that was used before ends its session."""
        session, generation = self._opened(token)
        scope = self._store.claimed_by(SESSION, "", ID_CLAIM, session)
        if scope is None:
            raise _refused()

        def change(draft: Draft) -> str | None:
            found = draft.get(SESSION, scope, session)
            if found is None or found.status is None:
                return None
            user = draft.get(USER, scope, found.spec.user)
            expired = min(found.spec.expires_at_ns, found.status.idle_expires_at_ns) <= draft.now_ns
            if user is None or user.spec.disabled or expired or found.status.generation != generation:
                _end(draft, scope, session)
                return None
            status = SessionStatus(
                generation=generation + 1, idle_expires_at_ns=draft.now_ns + IDLE_SECONDS * NS
            )
            draft.put(SESSION, scope, session, spec=found.spec, status=status)
            return found.spec.user

        found = self._store.get(SESSION, scope, session)
        reused = found is not None and found.status is not None and found.status.generation != generation
        done = await self._store.transact(
            change,
            actor=actor,
            action="auth.refresh_reuse" if reused else "auth.refresh",
            touches=[SESSION.key(scope, session)],
        )
        if done.value is None:
            raise _refused()
        return self._pair(done.value, session, generation + 1)

    async def close(self, user: str, session: str, *, actor: str) -> None:
        await self.close_all(user, actor=actor, action="auth.logout", only=session)

    async def close_all(
        self, user: str, *, actor: str, action: str, only: str | None = None, but: str | None = None
    ) -> None:
        """End sessions of a user; their access tokens end with them."""
        scope = user_scope(user)
        names = [
            one.name
            for one in self._store.list(SESSION, scope)
            if one.name != but and only in (None, one.name)
        ]

        def change(draft: Draft) -> None:
            for name in names:
                _end(draft, scope, name)

        touches = [SESSION.key(scope, name) for name in names]
        await self._store.transact(change, actor=actor, action=action, touches=touches)

    async def sweep(self) -> int:
        """Forget sessions that nobody can refresh any more; how many there were."""
        now = self._clock.now_ns()
        old = [
            one
            for one in self._store.list(SESSION)
            if one.status is None or min(one.spec.expires_at_ns, one.status.idle_expires_at_ns) <= now
        ]

        def change(draft: Draft) -> None:
            for one in old:
                _end(draft, one.scope, one.name)

        if old:
            touches = [Key(SESSION.name, one.scope, one.name) for one in old]
            await self._store.transact(change, actor="system", action="auth.sweep", touches=touches)
        return len(old)

    # Refresh tokens: 16 bytes of session, 4 of generation, 32 of MAC.

    def _refresh_token(self, session: str, generation: int) -> str:
        head = uuid.UUID(session).bytes + generation.to_bytes(4, "big")
        return base64.urlsafe_b64encode(head + self._mac(head)).rstrip(b"=").decode()

    def _opened(self, token: str) -> tuple[str, int]:
        try:
            raw = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        except (ValueError, binascii.Error) as error:
            raise _refused() from error
        head, mac = raw[:20], raw[20:]
        if len(raw) != 52 or not hmac.compare_digest(mac, self._mac(head)):
            raise _refused()
        return str(uuid.UUID(bytes=head[:16])), int.from_bytes(head[16:], "big")

    def _mac(self, head: bytes) -> bytes:
        return hmac.digest(self._mac_key, head, hashlib.sha256)


def _end(draft: Draft, scope: str, session: str) -> None:
    if draft.get(SESSION, scope, session) is not None:
        draft.delete(SESSION, scope, session)
        draft.release(SESSION, "", ID_CLAIM, session, scope)


def _refused() -> Unauthenticated:
    return Unauthenticated("the refresh token is unknown, expired, used or revoked")
