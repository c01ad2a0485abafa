"""Logins of proxies' users: access tokens that live an hour, refresh tokens that are good once.

A login is stored as a `proxy-session` in its user's scope. See `fleet.people.logins` for the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleetplane.domains.proxies.access import SYSTEM_ADMIN, Access, ProxyCaller, organization_of, role_name
from fleetplane.domains.proxies.kinds.records import (
    ID_CLAIM,
    MEMBERSHIP,
    SESSION,
    SessionSpec,
    SessionStatus,
    User,
    UserSpec,
    user_scope,
)
from fleetplane.domains.proxies.tenancy.members import TOKEN_PREFIX, ApiTokens
from fleetplane.domains.proxies.tenancy.users import FAMILY, USER_RULES
from fleetplane.fleet.people.account_kind import ACCOUNT, SCOPE, subject_of
from fleetplane.fleet.people.account_rules import AccountSource
from fleetplane.fleet.people.door import Admitted, Authenticators
from fleetplane.fleet.people.login_records import LoginActions, LoginPolicy, LoginRecord, LoginRecords
from fleetplane.fleet.people.logins import Logins
from fleetplane.kernel.access import Binding, Principal
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key, Nothing, Resource
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.pages import in_order

ACCESS_SECONDS = 3600
POLICY = LoginPolicy(
    algorithm="RS256",
    audience="fleetplane/proxies",
    keys="proxies/access",
    access_seconds=ACCESS_SECONDS,
    refresh_seconds=90 * 86_400,
    idle_seconds=30 * 86_400,
    refresh_secret="proxies/refresh-key",  # noqa: S106  # a name
    limit=100,
    actor="system/identity",
)
ProxyLogins = Logins[UserSpec, Nothing]


class ProxyLoginRecords(LoginRecords):
    """Stored in the scope of their user, and found by id through a claim."""

    kind = SESSION
    actions = LoginActions(
        opened="auth.login",
        closed="auth.logout",
        swept="auth.sweep",
        refreshed="auth.refresh",
        reused="auth.refresh_reuse",
    )

    def __init__(self, store: Store) -> None:
        self._store = store

    def new_id(self, clock: Clock) -> str:
        return new_uuid(clock)

    def key(self, account: str, login: str) -> Key:
        return SESSION.key(user_scope(account), login)

    def locate(self, login: str) -> Key | None:
        scope = self._store.claimed_by(SESSION, "", ID_CLAIM, login)
        return SESSION.key(scope, login) if scope is not None else None

    def read(self, reader: AccountSource, key: Key) -> LoginRecord | None:
        found = reader.get(SESSION, key.scope, key.name)
        return _login(found) if found is not None else None

    def list(self, reader: AccountSource, account: str | None = None) -> Sequence[LoginRecord]:
        scope = user_scope(account) if account is not None else ""
        return [_login(one) for one in in_order(reader.list(SESSION, scope))]

    def write(self, draft: Draft, login: LoginRecord) -> None:
        assert login.idle_expires_at_ns is not None
        scope, name = login.key.scope, login.key.name
        if draft.get(SESSION, scope, name) is None:
            draft.claim(SESSION, "", ID_CLAIM, name, scope)
        spec = SessionSpec(user=login.account, expires_at_ns=login.expires_at_ns)
        status = SessionStatus(generation=login.generation, idle_expires_at_ns=login.idle_expires_at_ns)
        draft.put(SESSION, scope, name, spec=spec, status=status)

    def end(self, draft: Draft, key: Key) -> None:
        if draft.get(SESSION, key.scope, key.name) is not None:
            draft.delete(SESSION, key.scope, key.name)
            draft.release(SESSION, "", ID_CLAIM, key.name, key.scope)


def _login(found: Resource[SessionSpec, SessionStatus]) -> LoginRecord:
    status = found.status or SessionStatus(generation=0, idle_expires_at_ns=0)
    return LoginRecord(
        key=SESSION.key(found.scope, found.name),
        account=found.spec.user,
        expires_at_ns=found.spec.expires_at_ns,
        idle_expires_at_ns=status.idle_expires_at_ns,
        generation=status.generation,
    )


def logins_of(store: Store, master: MasterKey, clock: Clock) -> ProxyLogins:
    def claims(user: User) -> dict[str, object]:
        return {"sub": user.name}

    return Logins(
        store, master, clock, policy=POLICY, rules=USER_RULES, records=ProxyLoginRecords(store), claims=claims
    )


class ProxyBearers:
    """Whose credential it is, as proxies know callers.

    A program with an API token, a user who logged in here, or whoever the door knows.
    """

    def __init__(
        self, store: Store, logins: ProxyLogins, tokens: ApiTokens, access: Access, door: Authenticators
    ) -> None:
        self._store = store
        self._logins = logins
        self._tokens = tokens
        self._access = access
        self._door = door
        door.accept(FAMILY, self._recognise)
        door.profile_roles[FAMILY] = self._roles_of

    def of_header(self, authorization: str | None) -> ProxyCaller:
        return self._caller(
            self._door.recognise_header(authorization, first=FAMILY, unknown=_unknown_token())
        )

    def of_token(self, token: str) -> ProxyCaller:
        return self._caller(self._door.recognise(token, first=FAMILY, unknown=_unknown_token()))

    def _caller(self, found: Admitted) -> ProxyCaller:
        if isinstance(found.caller, ProxyCaller):
            return self._with_bindings(found.caller, found)
        principal = self._door.principal(found)
        return ProxyCaller(
            name=principal.name, principal=principal, is_system_admin=self._access.is_system_admin(principal)
        )

    def _with_bindings(self, caller: ProxyCaller, found: Admitted) -> ProxyCaller:
        """A caller of our own, with what was bound to it beside its memberships."""
        given = self._door.given(found)
        if not given:
            return caller
        principal = Principal(name=found.name, roles=frozenset(), bindings=given)
        is_system_admin = caller.is_system_admin or self._access.is_system_admin(principal)
        return replace(caller, principal=principal, is_system_admin=is_system_admin)

    def _recognise(self, token: str) -> Admitted | None:
        return self._program(token) or self._user(token)

    def _program(self, token: str) -> Admitted | None:
        if not token.startswith(TOKEN_PREFIX):
            return None
        record, role = self._tokens.authenticate(token)
        name = f"api-token/{record.name}"
        held = Binding(role=role_name(role), scope=record.scope, origin=f"API token {record.spec.name!r}")
        return Admitted(
            name=name,
            subject=f"proxies-{name}",
            bindings=lambda: (held,),
            caller=ProxyCaller(name=name, organization=organization_of(record.scope), role=role),
        )

    def _user(self, token: str) -> Admitted | None:
        verified = self._logins.recognise(token)
        if verified is None:
            return None
        account = verified.account
        name = USER_RULES.principal(account)
        behind = USER_RULES.account(self._store, account.name)
        return Admitted(
            name=name,
            subject=subject_of(behind.name) if behind is not None else f"{FAMILY}-{name}",
            family=FAMILY,
            bindings=lambda: self._memberships(account),
            caller=ProxyCaller(
                name=name,
                user=account.name,
                session=verified.login,
                is_system_admin=account.spec.is_system_admin,
            ),
        )

    def _roles_of(self, account: str) -> Iterator[Binding]:
        """What is held by the user that an account is here."""
        found = self._store.get(ACCOUNT, SCOPE, account)
        profile = found.spec.profiles.get(FAMILY) if found is not None else None
        user = USER_RULES.active(self._store, profile) if profile is not None else None
        if user is not None:
            yield from self._memberships(user)

    def _memberships(self, account: User) -> Iterator[Binding]:
        if account.spec.is_system_admin:
            yield Binding(role=SYSTEM_ADMIN, origin="system administrator of proxies")
        for one in self._store.list(MEMBERSHIP):
            if one.name == account.name and one.spec.accepted:
                yield Binding(
                    role=role_name(one.spec.role), scope=one.scope, origin="member of the organization"
                )


def _unknown_token() -> Unauthenticated:
    return Unauthenticated("the bearer token is unknown", details={"cause": "unknown token"})
