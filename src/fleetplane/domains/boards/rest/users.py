"""REST: users, and their logins: access tokens for a quarter of an hour, refresh tokens for a week.

Both are signed with the same keys and carry their type, so that neither passes for the other. A refresh
token stays the same for as long as the login lasts: known clients keep the one they were given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict

from fleetplane.domains.boards.access import ADMINISTER
from fleetplane.domains.boards.joining.credentials import as_board_caller
from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.domains.boards.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    BoardCaller,
    Message,
    actor,
    changes,
    listed,
    number_in,
    projected,
)
from fleetplane.domains.boards.rest.shapes.people import (
    AccessToken,
    MadeUser,
    OpenedLogin,
    Profile,
    ShownUser,
    UserRows,
)
from fleetplane.domains.boards.users import (
    FAMILY,
    PERSON_RULES,
    People,
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
from fleetplane.kernel.access import Binding, covers
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import spelled_or_null
from fleetplane.web.rest.bodies import given
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

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


_ONE = "/users/{id}"
_AUTH = RouteGroup("Login")
_USERS = RouteGroup("Users")
BEARER = "Bearer"


class LoginBody(msgspec.Struct, forbid_unknown_fields=True):
    password: str
    username: str = ""
    email: str = ""


class RefreshBody(msgspec.Struct, forbid_unknown_fields=True):
    refresh_token: str


class PersonBody(msgspec.Struct, forbid_unknown_fields=True):
    username: str
    password: str
    email: str = ""
    first_name: str = ""
    last_name: str = ""
    role: str = "viewer"


class PersonPatch(msgspec.Struct, forbid_unknown_fields=True):
    username: str | UnsetType | None = UNSET
    email: str | UnsetType | None = UNSET
    first_name: str | UnsetType | None = UNSET
    last_name: str | UnsetType | None = UNSET
    role: str | UnsetType | None = UNSET
    is_active: bool | UnsetType | None = UNSET
    password: str | UnsetType | None = UNSET


class PeopleRoutes:
    def __init__(self, *, people: People, logins: BoardLogins, door: Authenticators) -> None:
        self._door = door
        self._people = people
        self._logins = logins

    def routes(self) -> Sequence[Route]:
        return (*self._login_routes(), *self._user_routes())

    def _login_routes(self) -> Sequence[Route]:
        return (
            _AUTH.post("/auth/login", self.login, public=True, body=LoginBody),
            _AUTH.post("/auth/refresh", self.refresh, public=True, body=RefreshBody),
            _AUTH.post("/auth/register", self.create, ADMINISTER, body=PersonBody, status=CREATED),
            _AUTH.get("/auth/profile", self.profile),
            _AUTH.post("/auth/logout", self.logout, recheck=_nothing_more),
        )

    def _user_routes(self) -> Sequence[Route]:
        return (
            _USERS.get("/users", self.list, ADMINISTER, query=PAGING),
            _USERS.put(_ONE, self.change, ADMINISTER, body=PersonPatch),
            _USERS.delete(_ONE, self.delete, ADMINISTER, status=NO_CONTENT),
        )

    # Logging in and out.

    async def login(self, call: BoardCall) -> Answer[OpenedLogin]:
        """Log in with a name or an e-mail address."""
        body: LoginBody = call.body
        found = await self._people.authenticate(
            body.username or body.email, body.password, address=call.address
        )
        by = principal_of(found.account)
        pair = await self._logins.open(found.account, actor=by, still_good=found.still_good)
        person = await self._people.record_login(found.account.name, actor=by)
        return Answer(
            content=OpenedLogin(
                **asdict(_token(pair.access)), refresh_token=pair.refresh, user=_shown(person)
            )
        )

    async def refresh(self, call: BoardCall) -> Answer[AccessToken]:
        """Get a new access token for a refresh token."""
        body: RefreshBody = call.body
        pair = await self._logins.refresh(body.refresh_token, actor="system/boards")
        return Answer(content=_token(pair.access))

    async def logout(self, call: BoardCall) -> Answer[Message]:
        """Close this login and revoke its tokens."""
        caller = call.caller
        if not caller.user:
            raise InvalidArgument("this is not a login's token; the owner of the server can revoke it")
        await self._logins.close(caller.user, only=caller.login, actor=caller.name)
        return Answer(content=Message(message="logged out"))

    async def profile(self, call: BoardCall) -> Answer[Profile]:
        """Get the caller of this token."""
        caller = call.caller
        person = self._people.find(caller.user) if caller.user else None
        if person is not None:
            return Answer(content=Profile(**asdict(_shown(person))))
        inside = covers(caller.principal.scope, SCOPE)
        roles = sorted(caller.principal.roles) if inside else []
        return Answer(content=Profile(id=None, username=caller.name, roles=roles, is_active=True))

    # Users.

    async def create(self, call: BoardCall) -> Answer[MadeUser]:
        """Create a user; administrators only."""
        body: PersonBody = call.body
        said = given(body)
        password = said.pop("password")

        def view(made: Person) -> Answer[MadeUser]:
            words = f"user {made.spec.username} was made"
            return Answer(content=MadeUser(message=words, user=_shown(made)))

        return call.answering(view)(
            await self._people.create(PersonSpec(**said), password, actor=actor(call))
        )

    async def list(self, call: BoardCall) -> Answer[UserRows]:
        """List users."""
        return Answer(content=listed(call, self._people.all(), _shown, UserRows))

    async def change(self, call: BoardCall) -> Answer[ShownUser]:
        """Change a user; a new password closes every login."""
        said = changes(call.body)
        password = said.pop("password", None)
        name = str(number_in(call))
        if password is not None:
            self._door.check_above(call.headers.credential, self._subject(name), family=FAMILY)
        person = await self._people.change(
            name, said, password=password, whole=self._is_whole(call, name), actor=actor(call)
        )
        return Answer(content=_shown(person))

    async def delete(self, call: BoardCall) -> Answer[None]:
        """Delete a user."""
        name = str(number_in(call))
        await self._people.delete(name, whole=self._is_whole(call, name), actor=actor(call))
        return Answer(content=None)

    def _subject(self, name: str) -> str:
        return subject_of(self._people.account_of(name).name)

    def _is_whole(self, call: BoardCall, name: str) -> bool:
        """Whether the caller may decide about all that a person is, and not only about the user."""
        return self._door.is_above(call.headers.credential, self._subject(name), family=FAMILY)


def _token(access: str) -> AccessToken:
    return AccessToken(access_token=access, token_type=BEARER, expires_in=ACCESS_SECONDS)


def _shown(person: Person) -> ShownUser:
    return projected(
        ShownUser,
        person.spec,
        person,
        id=int(person.name),
        last_login=spelled_or_null(person.status.last_login_at_ns if person.status is not None else None),
    )


def _nothing_more(_call: object) -> None:
    """Logging out says nothing that the one who did it may not hear again."""
