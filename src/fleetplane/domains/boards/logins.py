"""Logins of boards' users: access tokens for a quarter of an hour, refresh tokens for a week.

Both are signed with the same keys and carry their type, so that neither passes for the other. A refresh
token stays the same for as long as the login lasts: known clients keep the one they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleetplane.domains.boards.caller_roles import as_board_caller
from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.domains.boards.rest.common import BoardCaller
from fleetplane.domains.boards.users import (
    FAMILY,
    PERSON_RULES,
    Person,
    PersonSpec,
    PersonStatus,
    principal_of,
    role_of,
)
from fleetplane.fleet.people.account_kind import ACCOUNT, subject_of
from fleetplane.fleet.people.account_kind import SCOPE as ACCOUNTS
from fleetplane.fleet.people.account_rules import AccountSource
from fleetplane.fleet.people.door import Admitted, Authenticators
from fleetplane.fleet.people.login_records import LoginActions, LoginPolicy, LoginRecord, LoginRecords
from fleetplane.fleet.people.logins import Logins, VerifiedLogin
from fleetplane.kernel.access import Binding
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store

ACCESS_SECONDS = 900
POLICY = LoginPolicy(
    algorithm="EdDSA",
    audience="fleetplane/boards",
    keys="boards/login",
    access_seconds=ACCESS_SECONDS,
    refresh_seconds=7 * 86_400,
    limit=50,
    actor="system/boards",
)
ID_BYTES = 16
BoardLogins = Logins[PersonSpec, PersonStatus]


class LoginSpec(BoardsSpec, frozen=True):
    person: str
    expires_at_ns: int


LOGIN: Kind[LoginSpec, Nothing] = Kind("board-login", LoginSpec, Nothing)


class BoardLoginRecords(LoginRecords):
    """Stored under their id, in the one scope of boards."""

    kind = LOGIN
    actions = LoginActions(opened="boards.login", closed="boards.logout", swept="boards.logins_sweep")

    def new_id(self, clock: Clock) -> str:
        return clock.token_bytes(ID_BYTES).hex()

    def key(self, account: str, login: str) -> Key:  # noqa: ARG002  # all of them lie in one scope
        return LOGIN.key(SCOPE, login)

    def locate(self, login: str) -> Key | None:
        return LOGIN.key(SCOPE, login)

    def read(self, reader: AccountSource, key: Key) -> LoginRecord | None:
        found = reader.get(LOGIN, key.scope, key.name)
        if found is None:
            return None
        return LoginRecord(key=key, account=found.spec.person, expires_at_ns=found.spec.expires_at_ns)

    def list(self, reader: AccountSource, account: str | None = None) -> Sequence[LoginRecord]:
        found = sorted(reader.list(LOGIN, SCOPE), key=lambda one: one.created_revision)
        return [
            LoginRecord(
                key=LOGIN.key(SCOPE, one.name), account=one.spec.person, expires_at_ns=one.spec.expires_at_ns
            )
            for one in found
            if account in (None, one.spec.person)
        ]

    def write(self, draft: Draft, login: LoginRecord) -> None:
        spec = LoginSpec(person=login.account, expires_at_ns=login.expires_at_ns)
        draft.put(LOGIN, login.key.scope, login.key.name, spec=spec)

    def end(self, draft: Draft, key: Key) -> None:
        if draft.get(LOGIN, key.scope, key.name) is not None:
            draft.delete(LOGIN, key.scope, key.name)


def logins_of(store: Store, master: MasterKey, clock: Clock) -> BoardLogins:
    return Logins(
        store,
        master,
        clock,
        policy=POLICY,
        rules=PERSON_RULES,
        records=BoardLoginRecords(),
        claims=_claims,
    )


class BoardBearers:
    """Whose credential it is, as boards know callers: a user of theirs, or whoever the door knows."""

    def __init__(self, store: Store, logins: BoardLogins, door: Authenticators) -> None:
        self._store = store
        self._logins = logins
        self._door = door
        door.accept(FAMILY, self._recognise)
        door.profile_roles[FAMILY] = self._roles_of

    def of_header(self, authorization: str | None) -> BoardCaller:
        return self._caller(self._door.recognise_header(authorization, first=FAMILY))

    def of_token(self, token: str) -> BoardCaller:
        return self._caller(self._door.recognise(token, first=FAMILY))

    def _caller(self, found: Admitted) -> BoardCaller:
        verified = (
            found.caller if found.family == FAMILY and isinstance(found.caller, VerifiedLogin) else None
        )
        return BoardCaller(
            principal=as_board_caller(self._door.principal(found)),
            user=verified.account.name if verified is not None else "",
            login=verified.login if verified is not None else "",
        )

    def _recognise(self, token: str) -> Admitted | None:
        verified = self._logins.recognise(token)
        if verified is None:
            return None
        account = verified.account
        behind = PERSON_RULES.account(self._store, account.name)
        role = role_of(account)
        return Admitted(
            name=principal_of(account),
            subject=subject_of(behind.name) if behind is not None else f"{FAMILY}-user/{account.name}",
            family=FAMILY,
            roles=frozenset() if role is None else frozenset({role}),
            scope=SCOPE,
            caller=verified,
        )

    def _roles_of(self, account: str) -> Iterator[Binding]:
        """What is held by the user that an account is here."""
        found = self._store.get(ACCOUNT, ACCOUNTS, account)
        profile = found.spec.profiles.get(FAMILY) if found is not None else None
        user = PERSON_RULES.active(self._store, profile) if profile is not None else None
        if user is not None and (role := role_of(user)) is not None:
            yield Binding(role=role, scope=SCOPE, origin="user of boards")


def _claims(person: Person) -> dict[str, object]:
    return {"sub": person.spec.username, "user_id": int(person.name), "role": person.spec.role}
