"""Accounts by their own name: people who may be given roles at any scope of any domain.

Users of proxies and of boards are profiles of the same accounts (`account_kind`), with the ids and logins
that their clients know. `fleet.people.accounts` authenticates and changes them, `fleet.people.logins` keeps
the logins that were opened by the account's own name, here or through an identity provider.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from fleetplane.fleet.people.account_kind import (
    ACCOUNT,
    FAMILY,
    LOGIN_CLAIM,
    LOGIN_FORM,
    SCOPE,
    Account,
    AccountReader,
    AccountSpec,
    subject_of,
)
from fleetplane.fleet.people.account_rules import AccountActions, AccountRules, AccountSource, Companion
from fleetplane.fleet.people.accounts import Accounts, Authenticated
from fleetplane.fleet.people.attempts.throttle import ThrottleLimits
from fleetplane.fleet.people.door import Admitted
from fleetplane.fleet.people.linked_logins import LinkedLogins, LoginCloser
from fleetplane.fleet.people.login_records import LoginActions, LoginPolicy, LoginRecord, LoginRecords
from fleetplane.fleet.people.logins import Logins, VerifiedLogin
from fleetplane.fleet.people.openid.id_tokens import VouchedPerson
from fleetplane.fleet.people.profiles import is_free
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.passwords import fault
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import ABSENT, Draft, Store
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.kernel.values.ids import new_uuid

ACCOUNTS_LIMIT = 10_000
TEXT_LIMIT = 128
POLICY = LoginPolicy(
    algorithm="EdDSA",
    audience="fleetplane/people",
    keys="people/login",
    access_seconds=900,
    refresh_seconds=30 * 86_400,
    idle_seconds=7 * 86_400,
    refresh_secret="people/refresh-key",  # noqa: S106  # a name
    limit=50,
    actor="system/people",
)
_IDENTITY = "openid"
"""The claim that gives each person of a provider one account."""


class AccountLoginSpec(msgspec.Struct, frozen=True, kw_only=True):
    account: str
    expires_at_ns: int
    idle_expires_at_ns: int
    generation: int = 1
    opened_at_ns: int | None = None
    groups: tuple[str, ...] = ()


ACCOUNT_LOGIN: Kind[AccountLoginSpec, Nothing] = Kind("account-login", AccountLoginSpec, Nothing)
KINDS = (ACCOUNT, ACCOUNT_LOGIN)


class OwnAccountRules(AccountRules[AccountSpec, Nothing]):
    kind = ACCOUNT
    family = FAMILY
    namespace = FAMILY
    actions = AccountActions(
        create="people.account_create",
        update="people.account_update",
        delete="people.account_delete",
        reset="people.account_password",
        rehash="people.account_password",
    )
    limits = ThrottleLimits(per_address=20, failures=5)
    login_claim = LOGIN_CLAIM
    login_scope = SCOPE
    wrong_login = "the name or the password is wrong"
    tells_inactive = False
    capacity = ACCOUNTS_LIMIT

    def scope(self, name: str) -> str:  # noqa: ARG002  # all of them lie in one
        return SCOPE

    def login_names(self, spec: AccountSpec) -> frozenset[str]:
        return frozenset({spec.login})

    def checked(self, spec: AccountSpec, password: str | None = None) -> AccountSpec:
        if not LOGIN_FORM.fullmatch(spec.login):
            raise InvalidArgument(
                "has 1 to 128 of a-z, 0-9 and . _ @ + -, and begins with a letter or digit", field="name"
            )
        for field, text in (("displayName", spec.display_name), ("email", spec.email)):
            if len(text) > TEXT_LIMIT or not text.isprintable():
                raise InvalidArgument(f"has at most {TEXT_LIMIT} printable characters", field=field)
        if password is not None:
            self.check_password(password, field="password")
        return spec

    def check_password(self, password: str, *, field: str) -> None:
        if (found := fault(password)) is not None:
            raise InvalidArgument(found.value, field=field)

    def is_active(self, spec: AccountSpec) -> bool:
        return not spec.disabled

    def is_administrator(self, spec: AccountSpec) -> bool:  # noqa: ARG002  # the owner's socket always is
        return False

    def principal(self, account: Account) -> str:
        return subject_of(account.name)

    def account(self, reader: AccountSource, name: str) -> Account | None:
        return self.find(reader, name)

    def missing(self) -> NotFound:
        return NotFound("there is no such account", field="name")

    def taken(self, login: str) -> AlreadyExists:
        return AlreadyExists(f"there is an account {login!r} already", field="name")

    def last_administrator(self) -> FailedPrecondition:
        raise AssertionError("none of them is one by itself")


RULES = OwnAccountRules()
OwnLogins = Logins[AccountSpec, Nothing]


def vouched_by(spec: AccountSpec) -> str:
    """Who vouches for an account's owner, and under which name, for administrators who give roles."""
    return f"{spec.issuer} {spec.subject}" if spec.subject else ""


def _digest(issuer: str, subject: str) -> str:
    return hashlib.sha256(f"{issuer}\n{subject}".encode()).hexdigest()


class OwnAccounts(Accounts[AccountSpec, Nothing]):
    """The accounts, known by the name that they log in with."""

    def __init__(
        self,
        store: Store,
        master: MasterKey,
        clock: Clock,
        logins: LoginCloser,
        linked: LinkedLogins | None = None,
    ) -> None:
        super().__init__(store, master, clock, RULES, logins, linked)

    def all(self) -> Sequence[Account]:
        return self._store.list(ACCOUNT, SCOPE)

    async def create(self, spec: AccountSpec, password: str, *, actor: str) -> Account:
        return await self._create(spec.login, spec, None, password, Companion(), actor=actor)

    async def delete(self, name: str, *, actor: str) -> Account:
        """Delete a person: every profile, then the account. A profile that must stay prevents it."""
        return await run_to_completion(self._delete_person(name, actor=actor))

    async def _delete_person(self, name: str, *, actor: str) -> Account:
        await self._linked.remove(self.get(name), actor=actor)

        def change(draft: Draft) -> None:
            spec = RULES.present(draft, name).spec
            if spec.profiles:
                families = ", ".join(sorted(spec.profiles))
                raise FailedPrecondition(
                    f"the account is a user of {families} too", hint="enable these domains to delete it"
                )
            if spec.subject:
                draft.release(ACCOUNT, SCOPE, _IDENTITY, _digest(spec.issuer, spec.subject), name)

        return await self._delete(name, Companion(change=change), actor=actor)

    # People whom an identity provider vouches for.

    def vouched_for(self, reader: AccountReader, identity: VouchedPerson) -> Account | None:
        """The account of a person whom the provider vouches for; by issuer and subject, never by a name."""
        digest = _digest(identity.issuer, identity.subject)
        owner = reader.claimed_by(ACCOUNT, SCOPE, _IDENTITY, digest)
        return reader.get(ACCOUNT, SCOPE, owner) if owner is not None else None

    async def of_identity(
        self, identity: VouchedPerson, *, may_create: bool
    ) -> Authenticated[AccountSpec, Nothing]:
        """The account of a person whom the provider vouches for, made the first time.

        It holds no role then. What it is called follows from what the provider says, if no account has that
        name and nothing was bound to it in advance: whoever chooses a name at a provider must not be taken
        for another.
        """
        if (found := self.vouched_for(self._store, identity)) is None:
            if not may_create:
                raise PermissionDenied(
                    "there is no account for you here", hint="ask an administrator of this installation"
                )
            found = await self._create_vouched(identity)
        elif not RULES.is_active(found.spec):
            raise PermissionDenied("this account is not active", details={"cause": "inactive"})
        told = {"display_name": identity.display_name, "email": identity.email}
        changed = {field: text for field, text in told.items() if text and text != getattr(found.spec, field)}
        if changed:
            found = await self.update(found.name, changed, actor=subject_of(found.name))

        def still_good(draft: Draft) -> bool:
            current = self.vouched_for(draft, identity)
            return current is not None and current.name == found.name and RULES.is_active(current.spec)

        return Authenticated(account=found, still_good=still_good)

    async def _create_vouched(self, identity: VouchedPerson) -> Account:
        digest = _digest(identity.issuer, identity.subject)
        wanted = identity.name.strip().lower()
        names = [f"{wanted[:100] if LOGIN_FORM.fullmatch(wanted) else 'person'}-{digest[:12]}"]
        if LOGIN_FORM.fullmatch(wanted):
            names.insert(0, wanted)

        def change(draft: Draft) -> Account:
            if (present := self.vouched_for(draft, identity)) is not None:
                return present  # another window was faster
            if draft.count(ACCOUNT) >= ACCOUNTS_LIMIT:
                raise ResourceExhausted(f"there are {ACCOUNTS_LIMIT} accounts, the most there may be")
            name = next(
                (one for one in names if is_free(draft, one)),
                None,
            )
            if name is None:
                raise RULES.taken(names[-1])
            spec = AccountSpec(
                login=name,
                display_name=identity.display_name,
                email=identity.email,
                created_by=POLICY.actor,
                issuer=identity.issuer,
                subject=identity.subject,
            )
            draft.claim(ACCOUNT, SCOPE, RULES.login_claim, name, name)
            draft.claim(ACCOUNT, SCOPE, _IDENTITY, digest, name)
            return draft.put(ACCOUNT, SCOPE, name, spec=RULES.checked(spec), expect=ABSENT)

        touches = [ACCOUNT.key(SCOPE, name) for name in names]
        done = await self._store.transact(
            change, actor=POLICY.actor, action=RULES.actions.create, touches=touches
        )
        return done.value


class OwnLoginRecords(LoginRecords):
    """Stored under their id, in the one scope of accounts."""

    kind = ACCOUNT_LOGIN
    actions = LoginActions(
        opened="people.login",
        closed="people.logout",
        swept="people.logins_sweep",
        refreshed="people.refresh",
        reused="people.refresh_reuse",
    )

    def new_id(self, clock: Clock) -> str:
        return new_uuid(clock)  # which refresh tokens carry as 16 bytes

    def key(self, account: str, login: str) -> Key:  # noqa: ARG002  # all of them lie in one scope
        return ACCOUNT_LOGIN.key(SCOPE, login)

    def locate(self, login: str) -> Key | None:
        return ACCOUNT_LOGIN.key(SCOPE, login)

    def read(self, reader: AccountSource, key: Key) -> LoginRecord | None:
        found = reader.get(ACCOUNT_LOGIN, key.scope, key.name)
        return None if found is None else _login(found)

    def list(self, reader: AccountSource, account: str | None = None) -> Sequence[LoginRecord]:
        found = sorted(reader.list(ACCOUNT_LOGIN, SCOPE), key=lambda one: one.created_revision)
        return [_login(one) for one in found if account in (None, one.spec.account)]

    def write(self, draft: Draft, login: LoginRecord) -> None:
        assert login.idle_expires_at_ns is not None
        spec = AccountLoginSpec(
            account=login.account,
            expires_at_ns=login.expires_at_ns,
            idle_expires_at_ns=login.idle_expires_at_ns,
            generation=login.generation,
            opened_at_ns=login.opened_at_ns,
            groups=login.groups,
        )
        draft.put(ACCOUNT_LOGIN, login.key.scope, login.key.name, spec=spec)

    def end(self, draft: Draft, key: Key) -> None:
        if draft.get(ACCOUNT_LOGIN, key.scope, key.name) is not None:
            draft.delete(ACCOUNT_LOGIN, key.scope, key.name)


def _login(found: Resource[AccountLoginSpec, Nothing]) -> LoginRecord:
    return LoginRecord(
        key=ACCOUNT_LOGIN.key(found.scope, found.name),
        account=found.spec.account,
        expires_at_ns=found.spec.expires_at_ns,
        idle_expires_at_ns=found.spec.idle_expires_at_ns,
        generation=found.spec.generation,
        opened_at_ns=found.spec.opened_at_ns,
        groups=found.spec.groups,
    )


def logins_of(store: Store, master: MasterKey, clock: Clock) -> OwnLogins:
    def claims(account: Account) -> dict[str, object]:
        return {"sub": account.name}

    return Logins(store, master, clock, policy=POLICY, rules=RULES, records=OwnLoginRecords(), claims=claims)


def admitted(verified: VerifiedLogin[AccountSpec, Nothing]) -> Admitted:
    """An account as the door knows it, with the groups that its login has."""
    name = subject_of(verified.account.name)
    return Admitted(name=name, subject=name, family=FAMILY, groups=verified.groups, caller=verified)


def recogniser(logins: OwnLogins, token: str) -> Admitted | None:
    """Whose access token it is, for the door."""
    verified = logins.recognise(token)
    return None if verified is None else admitted(verified)
