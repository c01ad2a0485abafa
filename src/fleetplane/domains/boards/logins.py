"""Logins of people: access tokens for a quarter of an hour, refresh tokens for a week, and their end.

Both are signed with the same keys and say of what kind they are, so that neither passes for the
other. A login is written down; whoever logs out, loses the account, or gets another password ends
it, and both its tokens with it. A refresh token stays the same for as long as the login lasts:
known clients keep the one they were given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetplane.domains.boards.kinds import SCOPE, Nothing, Spec
from fleetplane.domains.boards.people import People, Person, role_of
from fleetplane.domains.boards.rest import Caller
from fleetplane.kernel.access import Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.resources import Kind, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store

ACCESS_SECONDS = 900
REFRESH_SECONDS = 7 * 86_400
LOGINS_LIMIT = 50
"""Of one person; a further one ends the oldest."""
KEY_LIFE_SECONDS = 30 * 86_400.0
AUDIENCE = "fleetplane/boards"
ISSUER = "fleetplane"
ID_BYTES = 16
NS = 1_000_000_000
_PURPOSE = "boards/login"


class LoginSpec(Spec, frozen=True):
    person: str
    expires_at_ns: int


Login = Resource[LoginSpec, Nothing]
LOGIN: Kind[LoginSpec, Nothing] = Kind("board-login", LoginSpec, Nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    access: str
    refresh: str


class Logins:
    """Also the answer to who holds a bearer token, be it one of these or an operator's."""

    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        *,
        people: People,
        operators: Operators,
        revocations: Revocations,
    ) -> None:
        self._store = store
        self._master = master
        self._clock = clock
        self._people = people
        self._operators = operators
        self._revocations = revocations
        self._loaded: SigningKeys | None = None

    def __repr__(self) -> str:
        return f"<Logins {len(self._store.list(LOGIN, SCOPE))}>"

    async def load(self) -> None:
        self._loaded = await SigningKeys.load_or_create(
            self._store, self._master, self._clock, purpose=_PURPOSE, algorithm="EdDSA",
            longest_life_seconds=float(REFRESH_SECONDS),
        )  # fmt: skip

    @property
    def _keys(self) -> SigningKeys:
        assert self._loaded is not None, "keys are loaded before anyone can ask"
        return self._loaded

    # Who it is.

    def of_header(self, authorization: str | None) -> Caller:
        scheme, _, bearer = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not bearer.strip():
            raise Unauthenticated("a bearer token is needed", hint="send `Authorization: Bearer TOKEN`")
        return self.of_token(bearer.strip())

    def of_token(self, bearer: str) -> Caller:
        if bearer.count(".") == 2:  # only signed tokens have dots
            try:
                claims = self._keys.verify(bearer, audience=AUDIENCE)
            except Unauthenticated as error:
                if error.details.get("cause") != "unknown key":
                    raise
            else:
                return self._person(claims)
        principal = self._operators.authenticate(bearer)
        self._revocations.check(principal=principal.name)
        return Caller(principal=principal)

    def _person(self, claims: dict[str, object]) -> Caller:
        if claims.get("token_type") != "access":
            raise Unauthenticated("this token is not one for access", details={"cause": "token type"})
        person = self._standing(claims)
        name = f"user/{person.spec.username}"
        self._revocations.check(principal=name)
        return Caller(
            principal=Principal(name=name, roles=frozenset({role_of(person)}), scope=SCOPE),
            user=person.name,
            login=str(claims.get("sid")),
        )

    def _standing(self, claims: dict[str, object]) -> Person:
        """Whose login it is, if it has not ended. The role is the present one, not the token's."""
        login = self._store.get(LOGIN, SCOPE, str(claims.get("sid")))
        person = self._people.find(login.spec.person) if login is not None else None
        if login is None or person is None or not person.spec.is_active:
            raise Unauthenticated("the login has ended", details={"cause": "ended"})
        return person

    # Logging in and out.

    async def open(self, person: Person, *, actor: str) -> TokenPair:
        name = self._clock.token_bytes(ID_BYTES).hex()
        older = sorted(self._of(person.name), key=lambda one: one.created_revision)
        surplus = [one.name for one in older[: max(0, len(older) + 1 - LOGINS_LIMIT)]]

        def change(draft: Draft) -> None:
            _end(draft, surplus)
            spec = LoginSpec(person=person.name, expires_at_ns=draft.now_ns + REFRESH_SECONDS * NS)
            draft.put(LOGIN, SCOPE, name, spec=spec, expect=ABSENT)

        await self._transact(change, [name, *surplus], actor=actor, action="boards.login")
        refresh = self._keys.sign(self._claims(person, name, "refresh"), life_seconds=float(REFRESH_SECONDS))
        return TokenPair(access=self._access(person, name), refresh=refresh)

    def refresh(self, token: str) -> str:
        """Another access token for the same login."""
        try:
            claims = self._keys.verify(token, audience=AUDIENCE)
        except Unauthenticated as error:
            raise Unauthenticated(
                f"the refresh token is not good: {error.message}", details=error.details
            ) from error
        if claims.get("token_type") != "refresh":
            raise InvalidArgument("is no refresh token", field="refresh_token")
        return self._access(self._standing(claims), str(claims.get("sid")))

    async def close(self, person: str, *, only: str | None = None, but: str = "", actor: str) -> None:
        """End logins of a person; their tokens end with them."""
        names = [one.name for one in self._of(person) if one.name != but and only in (None, one.name)]
        if names:
            await self._transact(lambda draft: _end(draft, names), names, actor=actor, action="boards.logout")

    async def sweep(self) -> None:
        """Forget logins that are over, and sign with another key once the present one is old."""
        now_ns = self._clock.now_ns()
        over = [one.name for one in self._store.list(LOGIN, SCOPE) if one.spec.expires_at_ns <= now_ns]
        if over:
            await self._transact(
                lambda draft: _end(draft, over), over, actor="system/boards", action="boards.logins_sweep"
            )
        if now_ns - self._keys.created_at_ns > KEY_LIFE_SECONDS * NS:
            await self._keys.rotate(actor="system/boards")

    def _of(self, person: str) -> list[Login]:
        return [one for one in self._store.list(LOGIN, SCOPE) if one.spec.person == person]

    def _access(self, person: Person, login: str) -> str:
        return self._keys.sign(self._claims(person, login, "access"), life_seconds=float(ACCESS_SECONDS))

    def _claims(self, person: Person, login: str, kind: str) -> dict[str, object]:
        return {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": person.spec.username,
            "user_id": int(person.name),
            "role": person.spec.role,
            "token_type": kind,
            "sid": login,
        }

    async def _transact(
        self, change: Callable[[Draft], None], names: list[str], *, actor: str, action: str
    ) -> None:
        await self._store.transact(
            change, actor=actor, action=action, touches=[LOGIN.key(SCOPE, name) for name in names]
        )


def _end(draft: Draft, names: list[str]) -> None:
    for name in names:
        if draft.get(LOGIN, SCOPE, name) is not None:
            draft.delete(LOGIN, SCOPE, name)
