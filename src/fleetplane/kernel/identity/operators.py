"""Who may act on this server from outside: people and programs that hold a bearer token of ours.

Two kinds of token, one answer. A kept token is for programs: it has a name, can be listed and
revoked, and lasts until then. A session is for a person at work: signed, short, written down
nowhere, and handed out only where the person has already been recognised. Both become the same
principal with roles and a scope; what these allow is the access table's business.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from fleetplane.kernel.access import EVERYWHERE, Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity.bindings import has_ended
from fleetplane.kernel.identity.master_key import MasterKey
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.identity.tokens import OneTimeTokens
from fleetplane.kernel.store import Store

AUDIENCE = "fleetplane-operator"
SESSION_LIMIT_SECONDS = 12 * 3600.0
"""A working day: a session can be ended early only by revoking its principal."""


class Operators:
    """See `load`. Sessions need keys, which are made when somebody first offers sessions."""

    def __init__(self, store: Store, master: MasterKey, clock: Clock) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._revocations = Revocations(store, clock)
        self.tokens = OneTimeTokens(store, master, clock)
        self._sessions: SigningKeys | None = None
        self._in_process: dict[str, Principal] = {}

    def __repr__(self) -> str:
        return f"<Operators tokens={len(self.tokens)}>"

    @classmethod
    async def load(cls, store: Store, master: MasterKey, clock: Clock) -> Operators:
        operators = cls(store, master, clock)
        await operators.tokens.load()
        return operators

    async def offer_sessions(self) -> None:
        """Load or make the keys of sessions; before this, no session is issued or accepted."""
        self._sessions = await SigningKeys.load_or_create(
            self._store,
            self._master,
            self._clock,
            purpose="operator-session",
            algorithm="EdDSA",
            longest_life_seconds=SESSION_LIMIT_SECONDS,
        )

    def session(
        self, name: str, *, roles: Iterable[Role], scope: str = EVERYWHERE, life_seconds: float
    ) -> str:
        """A token for one who is known to be `name`, such as the owner of the server's socket."""
        assert self._sessions is not None, "sessions are offered before they are given out"
        claims: dict[str, object] = {
            "sub": name,
            "aud": AUDIENCE,
            "roles": sorted(roles),
            "scope": scope,
            "opened_ns": self._clock.now_ns(),
        }
        return self._sessions.sign(claims, life_seconds=life_seconds)

    def in_process(self, principal: Principal) -> str:
        """A token for this principal that this process alone accepts, until it ends."""
        token = f"process_{secrets.token_urlsafe(32)}"
        self._in_process[token] = principal
        return token

    def authenticate(self, bearer: str) -> Principal:
        """The principal of a token, unless it was revoked; raises `Unauthenticated`."""
        principal = self._principal(bearer)
        self._revocations.check(principal=principal.name)
        return principal

    def _principal(self, bearer: str) -> Principal:
        if (known := self._in_process.get(bearer)) is not None:
            return known
        if bearer.count(".") == 2 and self._sessions is not None:  # only signed tokens have dots
            claims = self._sessions.verify(bearer, audience=AUDIENCE)
            found = _of_session(claims)
            opened_ns = claims.get("opened_ns")  # `iat` lies in the past, for clocks that lag
            if isinstance(opened_ns, int) and has_ended(self._store, found.scope, opened_ns):
                raise Unauthenticated("the session has ended with the tenant that it was opened for")
            return found
        return self.tokens.authenticate(bearer)

    def of_header(self, authorization: str | None) -> Principal:
        """The principal of an `Authorization` header."""
        return self.authenticate(bearer_of(authorization))


def bearer_of(authorization: str | None) -> str:
    """The bearer token in an `Authorization` header."""
    scheme, _, bearer = (authorization or "").strip().partition(" ")
    if scheme.lower() != "bearer" or not bearer.strip():
        raise Unauthenticated("a bearer token is needed", hint="send `Authorization: Bearer TOKEN`")
    return bearer.strip()


def _of_session(claims: dict[str, object]) -> Principal:
    roles, scope = claims.get("roles"), claims.get("scope")
    assert isinstance(roles, list)
    assert isinstance(scope, str)
    return Principal(
        name=f"operator/{claims.get('sub')}", roles=frozenset(Role(str(role)) for role in roles), scope=scope
    )
