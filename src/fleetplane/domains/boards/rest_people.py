"""REST: logging in, and who may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.access import ADMINISTER
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.logins import ACCESS_SECONDS, Logins
from fleetplane.domains.boards.people import People, Person, PersonSpec
from fleetplane.domains.boards.rest import (
    CREATED,
    NO_CONTENT,
    PAGING,
    BoardCall,
    Json,
    actor,
    listed,
    number_in,
)  # fmt: skip
from fleetplane.kernel.access import covers
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.bodies import given
from fleetplane.web.routes import Answer, Route
from fleetplane.web.times import spelled, spelled_or_null

_ONE = "/users/{id}"
_AUTH, _USERS = "Login", "Users"


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
    username: str | UnsetType = UNSET
    email: str | UnsetType = UNSET
    first_name: str | UnsetType = UNSET
    last_name: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    is_active: bool | UnsetType = UNSET
    password: str | UnsetType = UNSET


class PeopleRoutes:
    def __init__(self, *, people: People, logins: Logins) -> None:
        self._people = people
        self._logins = logins

    def routes(self) -> Sequence[Route]:
        return (*self._login_routes(), *self._user_routes())

    def _login_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST", path="/auth/login", handler=self.login, tag=_AUTH, public=True,
                summary="Log in with a name or an e-mail address", body=LoginBody, answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/auth/refresh", handler=self.refresh, tag=_AUTH, public=True,
                summary="Another access token", body=RefreshBody, answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/auth/register", handler=self.create, tag=_AUTH, permission=ADMINISTER,
                summary="Make a user; only for administrators", body=PersonBody, answer=dict[str, Any],
                status=CREATED,
            ),
            Route(
                method="GET", path="/auth/profile", handler=self.profile, tag=_AUTH,
                summary="Who the token belongs to", answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/auth/logout", handler=self.logout, tag=_AUTH,
                summary="End this login and its tokens", answer=dict[str, Any],
            ),
        )  # fmt: skip

    def _user_routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/users", handler=self.list, tag=_USERS, summary="Users",
                permission=ADMINISTER, answer=dict[str, Any], query=PAGING,
            ),
            Route(
                method="PUT", path=_ONE, handler=self.change, tag=_USERS, permission=ADMINISTER,
                summary="Change a user; another password ends every login", body=PersonPatch,
                answer=dict[str, Any],
            ),
            Route(
                method="DELETE", path=_ONE, handler=self.delete, tag=_USERS, permission=ADMINISTER,
                summary="Forget a user", status=NO_CONTENT,
            ),
        )  # fmt: skip

    # Logging in and out.

    async def login(self, call: BoardCall) -> Answer[Json]:
        body: LoginBody = call.body
        person = await self._people.recognise(
            body.username or body.email, body.password, address=call.address
        )
        by = f"user/{person.spec.username}"
        person = await self._people.came(int(person.name), actor=by)
        pair = await self._logins.open(person, actor=by)
        return Answer(
            content={
                **_token(pair.access),
                "refresh_token": pair.refresh,
                "user": _shown(person),
            }
        )

    async def refresh(self, call: BoardCall) -> Answer[Json]:
        body: RefreshBody = call.body
        return Answer(content=_token(self._logins.refresh(body.refresh_token)))

    async def logout(self, call: BoardCall) -> Answer[Json]:
        caller = call.caller
        if not caller.user:
            raise InvalidArgument("this token is no login; the owner of the server can revoke it")
        await self._logins.close(caller.user, only=caller.login, actor=caller.name)
        return Answer(content={"message": "logged out"})

    async def profile(self, call: BoardCall) -> Answer[Json]:
        caller = call.caller
        person = self._people.find(caller.user) if caller.user else None
        if person is not None:
            return Answer(content=_shown(person))
        inside = covers(caller.principal.scope, SCOPE)
        roles = sorted(caller.principal.roles) if inside else []
        return Answer(content={"id": None, "username": caller.name, "roles": roles, "is_active": True})

    # Users.

    async def create(self, call: BoardCall) -> Answer[Json]:
        body: PersonBody = call.body
        said = given(body)
        password = said.pop("password")

        def view(made: Person) -> Answer[Json]:
            return Answer(content={"message": f"user {made.spec.username} was made", "user": _shown(made)})

        return call.answering(view)(
            await self._people.create(PersonSpec(**said), password, actor=actor(call))
        )

    async def list(self, call: BoardCall) -> Answer[Json]:
        return Answer(content=listed(call, self._people.all(), _shown, name="users"))

    async def change(self, call: BoardCall) -> Answer[Json]:
        said = given(call.body)
        password = said.pop("password", None)
        number, by = number_in(call), actor(call)
        if password is not None:
            await self._people.set_password(number, password, actor=by)
        person = await self._people.update(number, actor=by, **said) if said else self._people.get(number)
        if password is not None or not person.spec.is_active:
            await self._logins.close(person.name, actor=by)
        return Answer(content=_shown(person))

    async def delete(self, call: BoardCall) -> Answer[None]:
        person = await self._people.delete(number_in(call), actor=actor(call))
        await self._logins.close(person.name, actor=actor(call))
        return Answer(content=None)


def _token(access: str) -> Json:
    return {"access_token": access, "token_type": "Bearer", "expires_in": ACCESS_SECONDS}


def _shown(person: Person) -> Json:
    spec, status = person.spec, person.status
    return {
        "id": int(person.name),
        "username": spec.username,
        "email": spec.email,
        "role": spec.role,
        "first_name": spec.first_name,
        "last_name": spec.last_name,
        "is_active": spec.is_active,
        "last_login": spelled_or_null(status.last_login_at_ns if status is not None else None),
        "created_at": spelled(person.created_at_ns),
    }
