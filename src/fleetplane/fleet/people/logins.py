"""Logins: an access token for minutes, a refresh token for days, and the record that both depend on.

A login is a stored record. Whoever logs out, is deactivated or gets another password loses the record, and
with it every token that stems from it. `LoginPolicy` holds what differs between token families. Where
refresh tokens rotate, refreshing moves the record to the next generation in a transaction, so of two
clients that refresh at once one wins; an older generation under a good MAC was stolen or replayed, and ends
the login. Nothing that opens a login is stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from fleetplane.fleet.people.account_rules import AccountRules, AccountSource, S, T
from fleetplane.fleet.people.login_records import LoginPolicy, LoginRecord, LoginRecords
from fleetplane.fleet.people.refresh_tokens import RefreshTokens, RotatingRefresh, SignedRefresh, refused
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.resources import Key, Resource
from fleetplane.kernel.store import Draft, Store, transact_found
from fleetplane.kernel.values.times import NS

VERIFIED_LIMIT = 10_000
"""Access tokens whose signature is known to be good; about 1 KB each."""
PUBLISHED_SECONDS = 3600
"""How long a key is published before it signs, where several servers do."""
ISSUER = "fleetplane"
_ACCESS = "access"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    access: str
    refresh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedLogin(Generic[S, T]):
    """Whose access token it is. The account is as it is now, not as it was when the token was issued."""

    account: Resource[S, T]
    login: str
    groups: tuple[str, ...] = ()
    """As the login has them; see `LoginRecord.groups`."""
    ends_at_ns: int = 0
    """When the login is over, however often it is refreshed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """An access token whose signature and claims were found good."""

    login: str
    expires_at_ns: int


class Logins(Generic[S, T]):
    """The logins of one domain's accounts. `load` comes before everything else."""

    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        *,
        policy: LoginPolicy,
        rules: AccountRules[S, T],
        records: LoginRecords,
        claims: Callable[[Resource[S, T]], dict[str, object]],
    ) -> None:
        """`claims` is what a token says of its account, beside what every token says."""
        self._store = store
        self._master = master
        self._clock = clock
        self._policy = policy
        self._rules = rules
        self._records = records
        self._claims = claims
        self._signed: OrderedDict[str, _Signed] = OrderedDict()
        self._loaded: tuple[SigningKeys, RefreshTokens] | None = None

    def __repr__(self) -> str:
        return f"<Logins {self._policy.audience} {len(self._records.list(self._store))}>"

    async def load(self) -> None:
        """Load the keys, or make them the first time."""
        policy = self._policy
        keys = await SigningKeys.load_or_create(
            self._store,
            self._master,
            self._clock,
            purpose=policy.keys,
            algorithm=policy.algorithm,
            longest_life_seconds=float(policy.longest_token_seconds),
        )
        if policy.refresh_secret:
            self._loaded = (
                keys,
                await RotatingRefresh.load_or_create(
                    self._store, self._master, self._clock, secret=policy.refresh_secret
                ),
            )
        else:
            self._loaded = (
                keys,
                SignedRefresh(keys, audience=policy.audience, life_seconds=float(policy.refresh_seconds)),
            )

    @property
    def _keys(self) -> SigningKeys:
        assert self._loaded is not None, "keys are loaded before anyone can ask"
        return self._loaded[0]

    @property
    def _refresh_tokens(self) -> RefreshTokens:
        assert self._loaded is not None, "keys are loaded before anyone can ask"
        return self._loaded[1]

    def jwks(self) -> dict[str, list[dict[str, str]]]:
        """The public keys, for others who verify access tokens."""
        return self._keys.jwks()

    # Access tokens.

    def verify(self, token: str) -> VerifiedLogin[S, T]:
        """Whose access token it is, while its login and its account are in force."""
        signed = self._signed.get(token) or self._verified(token)
        found = self._standing(self._store, signed.login)  # first: a login that was ended is told apart
        if signed.expires_at_ns <= self._clock.now_ns():
            self._signed.pop(token, None)
            raise Unauthenticated("the token has expired", details={"cause": "expired"})
        return found

    def recognise(self, token: str) -> VerifiedLogin[S, T] | None:
        """As `verify`; None for what has not the form of a signed token."""
        return self.verify(token) if token.count(".") == 2 else None

    def standing(self, login: str, *, within_seconds: float) -> VerifiedLogin[S, T]:
        """A login that was opened at most so long ago, while it and its account are in force."""
        key = self._records.locate(login)
        found = self._records.read(self._store, key) if key is not None else None
        now_ns = self._clock.now_ns()
        if found is None or found.is_over(now_ns):
            raise Unauthenticated("the login has ended", details={"cause": "ended"})
        opened_at_ns = found.opened_at_ns
        if opened_at_ns is None:
            opened_at_ns = found.expires_at_ns - self._policy.refresh_seconds * NS
        if now_ns >= opened_at_ns + within_seconds * NS:
            raise Unauthenticated("the session has expired", details={"cause": "expired"})
        return self._standing(self._store, login)

    def current(self, login: str) -> VerifiedLogin[S, T]:
        """A login by its id, while it and its account are in force; raises `Unauthenticated`."""
        return self._standing(self._store, login)

    def stands(self, reader: AccountSource, login: str) -> bool:
        """Whether a login and its account are in force, as one transaction sees it."""
        try:
            self._standing(reader, login)
        except Unauthenticated:
            return False
        return True

    def login_in(self, access: str) -> str:
        """The id of the login that an access token of ours stems from."""
        return self.verify(access).login

    def _verified(self, token: str) -> _Signed:
        claims = self._keys.verify(token, audience=self._policy.audience, expired_too=True)
        if claims.get("iss") != ISSUER:
            raise Unauthenticated("the token was not issued here", details={"cause": "issuer"})
        if claims.get("token_type", _ACCESS) != _ACCESS:
            raise Unauthenticated("this token is not one for access", details={"cause": "token type"})
        signed = _Signed(login=str(claims.get("sid")), expires_at_ns=int(str(claims["exp"])) * NS)
        self._signed[token] = signed
        if len(self._signed) > VERIFIED_LIMIT:
            self._signed.popitem(last=False)
        return signed

    def _standing(self, reader: AccountSource, login: str) -> VerifiedLogin[S, T]:
        key = self._records.locate(login)
        found = self._records.read(reader, key) if key is not None else None
        account = self._rules.active(reader, found.account) if found is not None else None
        if found is None or account is None or _is_of_a_namesake(found, account):
            raise Unauthenticated("the login has ended", details={"cause": "ended"})
        return VerifiedLogin(
            account=account, login=login, groups=found.groups, ends_at_ns=found.expires_at_ns
        )

    # Opening and closing.

    async def open(
        self,
        account: Resource[S, T],
        *,
        actor: str,
        still_good: Callable[[Draft], bool] = lambda _: True,
        groups: tuple[str, ...] = (),
        ends_at_ns: int | None = None,
    ) -> TokenPair:
        """Log an account in. `still_good` is checked inside the transaction that writes the login.

        `groups` are what an identity provider told of the user; `ends_at_ns` is where the login ends, if that
        is sooner than the family's logins do.
        """
        policy, records = self._policy, self._records
        key = records.key(account.name, records.new_id(self._clock))

        def older(reader: AccountSource) -> Sequence[Key]:
            return [one.key for one in records.list(reader, account.name)]

        def surplus(reader: AccountSource) -> Sequence[Key]:
            present = older(reader)
            return present[: max(0, len(present) + 1 - policy.limit)]

        def change(draft: Draft, surplus: Sequence[Key]) -> LoginRecord:
            if not still_good(draft):
                raise Unauthenticated(self._rules.wrong_login)
            for one in surplus:
                records.end(draft, one)
            longest = draft.now_ns + policy.refresh_seconds * NS
            login = LoginRecord(
                key=key,
                account=account.name,
                expires_at_ns=min(ends_at_ns or longest, longest),
                idle_expires_at_ns=self._idle_end(draft),
                opened_at_ns=draft.now_ns,
                groups=groups,
            )
            records.write(draft, login)
            return login

        done = await transact_found(
            self._store,
            surplus,
            change,
            actor=actor,
            action=records.actions.opened,
            touches=[key],
            among=older,
        )
        return self._pair(account, done.value)

    async def refresh(self, token: str, *, actor: str) -> TokenPair:
        """The next pair of the login that a refresh token stems from."""
        login, generation = self._refresh_tokens.read(token)
        if self._refresh_tokens.rotates:
            return await self._rotate(login, generation, actor=actor)
        account = self._standing(self._store, login).account
        return TokenPair(access=self._access(account, login), refresh=token)

    async def _rotate(self, login: str, generation: int, *, actor: str) -> TokenPair:
        """Trade one generation for the next; a generation that was traded before ends the login."""
        records = self._records
        key = records.locate(login)
        if key is None:
            raise refused()

        def change(draft: Draft) -> tuple[Resource[S, T], LoginRecord] | None:
            found = records.read(draft, key)
            if found is None:
                return None
            account = self._rules.active(draft, found.account)
            if (
                account is None
                or _is_of_a_namesake(found, account)
                or found.is_over(draft.now_ns)
                or found.generation != generation
            ):
                records.end(draft, key)
                return None
            following = replace(found, generation=generation + 1, idle_expires_at_ns=self._idle_end(draft))
            records.write(draft, following)
            return account, following

        found = records.read(self._store, key)
        reused = found is not None and found.generation != generation
        action = records.actions.reused if reused else records.actions.refreshed
        done = await self._store.transact(change, actor=actor, action=action, touches=[key])
        if done.value is None:
            raise refused()
        return self._pair(*done.value)

    async def close(
        self, account: str, *, only: str | None = None, but: str = "", actor: str, action: str | None = None
    ) -> None:
        """End logins of an account, and every token of theirs.

        With an `action` that is what the audit log says, also where no login was open. A login that is being
        opened when this is called is ended too.
        """
        await self._store.settled(self._records.kind)

        def logins(reader: AccountSource) -> Sequence[Key]:
            return [
                one.key
                for one in self._records.list(reader, account)
                if one.key.name != but and only in (None, one.key.name)
            ]

        if logins(self._store) or action is not None:
            await self._end(logins, actor=actor, action=action or self._records.actions.closed)

    def all(self) -> Sequence[LoginRecord]:
        """Every login that is open, oldest first."""
        now_ns = self._clock.now_ns()
        return [one for one in self._records.list(self._store) if not one.is_over(now_ns)]

    async def sweep(self) -> str | None:
        """Delete logins that are over, and sign with another key once the present one is old; its id."""
        now_ns = self._clock.now_ns()

        def over(reader: AccountSource) -> Sequence[Key]:
            return [one.key for one in self._records.list(reader) if one.is_over(now_ns)]

        if over(self._store):
            await self._end(over, actor=self._policy.actor, action=self._records.actions.swept)
        left_ns = self._keys.created_at_ns + self._policy.key_life_seconds * NS - now_ns
        if self._store.shared:  # whoever reads the keys now and then, at any server, knows the next in time
            published_at_ns = self._keys.published_at_ns
            if published_at_ns is None and left_ns < PUBLISHED_SECONDS * NS:
                await self._keys.publish(actor=self._policy.actor)
                return None
            if published_at_ns is not None:
                left_ns = max(left_ns, published_at_ns + PUBLISHED_SECONDS * NS - now_ns)
        return await self.rotate_keys(actor=self._policy.actor) if left_ns < 0 else None

    async def rotate_keys(self, *, actor: str) -> str:
        """Sign with a new key; tokens of the former one stay good for as long as they live."""
        return await self._keys.rotate(actor=actor)

    async def _end(self, which: Callable[[AccountSource], Sequence[Key]], *, actor: str, action: str) -> None:
        def change(draft: Draft, keys: Sequence[Key]) -> None:
            for key in keys:
                self._records.end(draft, key)

        await transact_found(self._store, which, change, actor=actor, action=action)

    # Tokens.

    def _idle_end(self, draft: Draft) -> int | None:
        idle = self._policy.idle_seconds
        return None if idle is None else draft.now_ns + idle * NS

    def _pair(self, account: Resource[S, T], login: LoginRecord) -> TokenPair:
        refresh = self._refresh_tokens.issue(login.key.name, login.generation, self._all_claims(account))
        return TokenPair(access=self._access(account, login.key.name), refresh=refresh)

    def _access(self, account: Resource[S, T], login: str) -> str:
        claims = {**self._all_claims(account), "sid": login}
        if not self._refresh_tokens.rotates:  # refresh tokens are signed with the same keys
            claims["token_type"] = _ACCESS
        return self._keys.sign(claims, life_seconds=float(self._policy.access_seconds))

    def _all_claims(self, account: Resource[S, T]) -> dict[str, object]:
        return {"iss": ISSUER, "aud": self._policy.audience, **self._claims(account)}


def _is_of_a_namesake(login: LoginRecord, account: Resource[S, T]) -> bool:
    """Whether a login was opened before its account was made: by another who was called the same."""
    return login.opened_at_ns is not None and login.opened_at_ns < account.created_at_ns
