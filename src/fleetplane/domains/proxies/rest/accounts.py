"""REST: logging in, users, and the tokens of programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from fleetplane.domains.proxies.access import ADMINISTER, OWN, READ, SYSTEM, Access
from fleetplane.domains.proxies.kinds.records import (
    API_TOKEN,
    MEMBERSHIP,
    ORGANIZATION,
    USER,
    UserSpec,
    organization_scope,
)
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.rest import bodies as requests
from fleetplane.domains.proxies.rest import views
from fleetplane.domains.proxies.rest.common import (
    CREATED,
    NO_CONTENT,
    PAGING,
    ProxyCall,
    actor,
    changes,
    circumstances,
    created,
    done,
)
from fleetplane.domains.proxies.tenancy.logins import ACCESS_SECONDS, ProxyLogins
from fleetplane.domains.proxies.tenancy.members import ApiTokens
from fleetplane.domains.proxies.tenancy.users import FAMILY, Users
from fleetplane.fleet.people import logins as people
from fleetplane.fleet.people.account_kind import subject_of
from fleetplane.fleet.people.door import Authenticators
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.store import Store
from fleetplane.web.rest.pages import Listing, in_order, listing, paging
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

_AUTH = RouteGroup("Authentication")
_USERS = RouteGroup("Users")
_TOKENS = RouteGroup("API tokens")


class TokenPair(msgspec.Struct, frozen=True, kw_only=True):
    access_token: str
    refresh_token: str
    expires_in: int = ACCESS_SECONDS
    token_type: str = "Bearer"  # noqa: S105  # its kind


class MyOrganization(msgspec.Struct, frozen=True, kw_only=True):
    organization_id: str
    role: OrganizationRole


class Me(msgspec.Struct, frozen=True, kw_only=True):
    """The caller; `user` is null for programs."""

    name: str
    user: views.UserView | None
    organizations: Sequence[MyOrganization]


class AccountRoutes:
    def __init__(
        self,
        store: Store,
        access: Access,
        users: Users,
        logins: ProxyLogins,
        tokens: ApiTokens,
        door: Authenticators,
    ) -> None:
        self._door = door
        self._store = store
        self._access = access
        self._users = users
        self._logins = logins
        self._tokens = tokens

    def routes(self) -> Sequence[Route]:
        return (
            _AUTH.post("/auth/login", self.login, public=True, body=requests.Login),
            _AUTH.post("/auth/refresh", self.refresh, public=True, body=requests.Refresh),
            _AUTH.post("/auth/logout", self.logout, status=NO_CONTENT),
            _AUTH.get("/auth/me", self.me),
            _AUTH.post("/auth/password", self.password, body=requests.ChangePassword, status=NO_CONTENT),
            _USERS.get("/users", self.users, SYSTEM, query=PAGING),
            _USERS.post("/users", self.create_user, SYSTEM, body=requests.CreateUser, status=CREATED),
            _USERS.get("/users/{user_id}", self.user, SYSTEM),
            _USERS.patch("/users/{user_id}", self.update_user, SYSTEM, body=requests.UpdateUser),
            _USERS.delete("/users/{user_id}", self.delete_user, SYSTEM, status=NO_CONTENT),
            _TOKENS.get(
                "/api-tokens",
                self.tokens,
                query=(*PAGING, Query(name="organization_id", summary="Only of this organization")),
            ),
            _TOKENS.post(
                "/api-tokens",
                self.create_token,
                body=requests.CreateApiToken,
                status=CREATED,
                recheck=self._may_create_token,
            ),
            _TOKENS.delete("/api-tokens/{api_token_id}", self.revoke_token, ADMINISTER, status=NO_CONTENT),
        )

    # Sessions.

    async def login(self, call: ProxyCall) -> Answer[TokenPair]:
        """Log in."""
        body: requests.Login = call.body
        who = circumstances(call, "login")
        found = await self._users.authenticate(body.email, body.password, address=call.address, actor=who)
        pair = await self._logins.open(found.account, actor=who, still_good=found.still_good)
        return Answer(content=_shown(pair))

    async def refresh(self, call: ProxyCall) -> Answer[TokenPair]:
        """Exchange a refresh token for a new token pair; reusing one ends the login."""
        body: requests.Refresh = call.body
        who = circumstances(call, "login")
        return Answer(content=_shown(await self._logins.refresh(body.refresh_token, actor=who)))

    async def logout(self, call: ProxyCall) -> Answer[None]:
        """Log out."""
        caller = call.caller
        if caller.user:
            await self._logins.close(caller.user, only=caller.session, actor=actor(call))
        return done()

    async def me(self, call: ProxyCall) -> Answer[Me]:
        """Get the caller of this token."""
        caller = call.caller
        if not caller.user:
            mine = [
                MyOrganization(organization_id=one.name, role=role)
                for one in in_order(self._store.list(ORGANIZATION))
                if (role := self._access.role_in(caller, one.name)) is not None
            ]
            return Answer(content=Me(name=caller.name, user=None, organizations=mine))
        mine = [
            MyOrganization(organization_id=one.scope.removeprefix("org/"), role=one.spec.role)
            for one in in_order(self._store.list(MEMBERSHIP))
            if one.name == caller.user and one.spec.accepted
        ]
        user = views.user(self._users.get(caller.user))
        return Answer(content=Me(name=caller.name, user=user, organizations=mine))

    async def password(self, call: ProxyCall) -> Answer[None]:
        """Change the caller's password; other logins are closed."""
        body: requests.ChangePassword = call.body
        if not call.caller.user:
            raise PermissionDenied("an API token has no password")
        await self._users.change_password(
            self._users.get(call.caller.user),
            body.current_password,
            body.new_password,
            session=call.caller.session,
            actor=actor(call),
        )
        return done()

    # Users.

    async def users(self, call: ProxyCall) -> Answer[Listing[views.UserView]]:
        """List users."""
        return Answer(content=listing(in_order(self._store.list(USER)), paging(call.query), views.user))

    async def create_user(self, call: ProxyCall) -> Answer[views.UserView]:
        """Create a user."""
        body: requests.CreateUser = call.body
        spec = UserSpec(email=body.email, name=body.name, is_system_admin=body.is_system_admin)
        answer = call.answering(lambda made: created(views.user(made), made, "users"))
        return answer(await self._users.create(spec, body.password, actor=actor(call)))

    async def user(self, call: ProxyCall) -> Answer[views.UserView]:
        """Get a user."""
        return Answer(content=views.user(self._users.get(call.path["user_id"])))

    async def update_user(self, call: ProxyCall) -> Answer[views.UserView]:
        """Change a user."""
        body: requests.UpdateUser = call.body
        given, identity = changes(body), call.path["user_id"]
        password = given.pop("password", None)
        if password is not None:
            self._door.check_above(call.headers.credential, self._subject(identity), family=FAMILY)
        whole = self._is_whole(call, identity)
        updated = await self._users.change(identity, given, password=password, whole=whole, actor=actor(call))
        return Answer(content=views.user(updated))

    async def delete_user(self, call: ProxyCall) -> Answer[None]:
        """Delete a user."""
        identity = call.path["user_id"]
        whole = self._is_whole(call, identity)
        await self._users.delete(identity, by=call.caller.user, whole=whole, actor=actor(call))
        return done()

    def _subject(self, identity: str) -> str:
        return subject_of(self._users.account_of(identity).name)

    def _is_whole(self, call: ProxyCall, identity: str) -> bool:
        """Whether the caller may decide about all that a person is, and not only about the user."""
        return self._door.is_above(call.headers.credential, self._subject(identity), family=FAMILY)

    # API tokens.

    async def tokens(self, call: ProxyCall) -> Answer[Listing[views.ApiTokenView]]:
        """List API tokens."""
        organization = call.query.get("organization_id")
        if organization is not None:
            self._known(call, organization, READ)
        scope = organization_scope(organization) if organization is not None else ""
        found = [
            token
            for token in in_order(self._store.list(API_TOKEN, scope))
            if self._access.may(call.caller, ADMINISTER, token.scope)
        ]
        return Answer(content=listing(found, paging(call.query), views.api_token))

    async def create_token(self, call: ProxyCall) -> Answer[views.ApiTokenView]:
        """Create an API token; its text is returned once."""
        body: requests.CreateApiToken = call.body
        role = self._may_create_token(call)
        answer = call.answering(
            lambda made: created(views.api_token(made.record, made.token), made.record, "api-tokens")
        )
        return answer(
            await self._tokens.create(
                body.organization_id,
                body.name,
                body.role,
                days=body.expires_in_days,
                by=role,
                creator=call.caller.name,
                actor=actor(call),
            )
        )

    def _may_create_token(self, call: ProxyCall) -> OrganizationRole:
        """The caller's role in the organisation that the body names."""
        body: requests.CreateApiToken = call.body
        needed = OWN if body.role is OrganizationRole.OWNER else ADMINISTER
        self._known(call, body.organization_id, needed)
        role = self._access.role_in(replace(call.caller, principal=None), body.organization_id)
        if role is None:  # the token's rights follow its maker's membership, and would end at once
            raise PermissionDenied(
                "an API token is made by a member of the organization",
                hint="a token with roles at a scope is made with `fleetplane tokens create`",
            )
        return role

    def _known(self, call: ProxyCall, organization: str, permission: Permission) -> None:
        if self._access.locate(ORGANIZATION, organization) is None:
            raise NotFound("organization not found")
        self._access.check(call.caller, permission, organization_scope(organization), missing="organization")

    async def revoke_token(self, call: ProxyCall) -> Answer[None]:
        """Revoke an API token."""
        await self._tokens.revoke(call.scope, call.path["api_token_id"], actor=actor(call))
        return done()


def _shown(pair: people.TokenPair) -> TokenPair:
    return TokenPair(access_token=pair.access, refresh_token=pair.refresh)
