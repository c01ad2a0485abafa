"""REST: logging in, users, and the tokens of programs."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from fleetplane.domains.proxies import requests, views
from fleetplane.domains.proxies.access import ADMINISTER, OWN, READ, SYSTEM, Access
from fleetplane.domains.proxies.accounts import Accounts
from fleetplane.domains.proxies.kinds import (
    API_TOKEN,
    MEMBERSHIP,
    ORGANIZATION,
    USER,
    UserSpec,
    organization_scope,
)
from fleetplane.domains.proxies.members import ApiTokens
from fleetplane.domains.proxies.rest import (
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
from fleetplane.domains.proxies.sessions import Sessions, TokenPair
from fleetplane.domains.proxies.values import OrganizationRole
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.store import Store
from fleetplane.web.paging import Listing, in_order, listing, paging
from fleetplane.web.routes import Answer, Query, Route

_AUTH, _USERS, _TOKENS = "Authentication", "Users", "API tokens"


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
        self, store: Store, access: Access, accounts: Accounts, sessions: Sessions, tokens: ApiTokens
    ) -> None:
        self._store = store
        self._access = access
        self._accounts = accounts
        self._sessions = sessions
        self._tokens = tokens

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST", path="/auth/login", handler=self.login, summary="Log in", tag=_AUTH,
                public=True, body=requests.Login, answer=TokenPair,
            ),
            Route(
                method="POST", path="/auth/refresh", handler=self.refresh, tag=_AUTH, public=True,
                summary="Trade a refresh token for a new pair; a used one ends the session",
                body=requests.Refresh, answer=TokenPair,
            ),
            Route(
                method="POST", path="/auth/logout", handler=self.logout, summary="End this session",
                tag=_AUTH, status=NO_CONTENT,
            ),
            Route(method="GET", path="/auth/me", handler=self.me, summary="Who am I", tag=_AUTH, answer=Me),
            Route(
                method="POST", path="/auth/password", handler=self.password, tag=_AUTH,
                summary="Change my password; my other sessions end",
                body=requests.ChangePassword, status=NO_CONTENT,
            ),
            Route(
                method="GET", path="/users", handler=self.users, summary="List users", tag=_USERS,
                permission=SYSTEM, answer=Listing[views.UserView], query=PAGING,
            ),
            Route(
                method="POST", path="/users", handler=self.create_user, summary="Create a user", tag=_USERS,
                permission=SYSTEM, body=requests.CreateUser, answer=views.UserView, status=CREATED,
            ),
            Route(
                method="GET", path="/users/{user_id}", handler=self.user, summary="Get a user", tag=_USERS,
                permission=SYSTEM, answer=views.UserView,
            ),
            Route(
                method="PATCH", path="/users/{user_id}", handler=self.update_user, tag=_USERS,
                summary="Change a user", permission=SYSTEM, body=requests.UpdateUser, answer=views.UserView,
            ),
            Route(
                method="DELETE", path="/users/{user_id}", handler=self.delete_user, tag=_USERS,
                summary="Delete a user", permission=SYSTEM, status=NO_CONTENT,
            ),
            Route(
                method="GET", path="/api-tokens", handler=self.tokens, summary="List API tokens",
                tag=_TOKENS, answer=Listing[views.ApiTokenView],
                query=(*PAGING, Query(name="organization_id", summary="Only of this organization")),
            ),
            Route(
                method="POST", path="/api-tokens", handler=self.create_token, tag=_TOKENS,
                summary="Create an API token; it is shown this once", body=requests.CreateApiToken,
                answer=views.ApiTokenView, status=CREATED,
            ),
            Route(
                method="DELETE", path="/api-tokens/{api_token_id}", handler=self.revoke_token, tag=_TOKENS,
                summary="Revoke an API token", permission=ADMINISTER, status=NO_CONTENT,
            ),
        )  # fmt: skip

    # Sessions.

    async def login(self, call: ProxyCall) -> Answer[TokenPair]:
        body: requests.Login = call.body
        who = circumstances(call, "login")
        pair = await self._accounts.login(body.email, body.password, address=call.address, actor=who)
        return Answer(content=pair)

    async def refresh(self, call: ProxyCall) -> Answer[TokenPair]:
        body: requests.Refresh = call.body
        who = circumstances(call, "login")
        return Answer(content=await self._sessions.refresh(body.refresh_token, actor=who))

    async def logout(self, call: ProxyCall) -> Answer[None]:
        caller = call.caller
        if caller.user:
            await self._sessions.close(caller.user, caller.session, actor=actor(call))
        return done()

    async def me(self, call: ProxyCall) -> Answer[Me]:
        caller = call.caller
        if not caller.user:
            assert caller.role is not None
            mine = [MyOrganization(organization_id=caller.organization, role=caller.role)]
            return Answer(content=Me(name=caller.name, user=None, organizations=mine))
        mine = [
            MyOrganization(organization_id=one.scope.removeprefix("org/"), role=one.spec.role)
            for one in in_order(self._store.list(MEMBERSHIP))
            if one.name == caller.user
        ]
        user = views.user(self._accounts.get(caller.user))
        return Answer(content=Me(name=caller.name, user=user, organizations=mine))

    async def password(self, call: ProxyCall) -> Answer[None]:
        body: requests.ChangePassword = call.body
        if not call.caller.user:
            raise PermissionDenied("an API token has no password")
        await self._accounts.change_password(
            self._accounts.get(call.caller.user), body.current_password, body.new_password,
            session=call.caller.session, actor=actor(call),
        )  # fmt: skip
        return done()

    # Users.

    async def users(self, call: ProxyCall) -> Answer[Listing[views.UserView]]:
        return Answer(content=listing(in_order(self._store.list(USER)), paging(call.query), views.user))

    async def create_user(self, call: ProxyCall) -> Answer[views.UserView]:
        body: requests.CreateUser = call.body
        spec = UserSpec(email=body.email, name=body.name, is_system_admin=body.is_system_admin)
        answer = call.answering(lambda made: created(views.user(made), made, "users"))
        return answer(await self._accounts.create(spec, body.password, actor=actor(call)))

    async def user(self, call: ProxyCall) -> Answer[views.UserView]:
        return Answer(content=views.user(self._accounts.get(call.path["user_id"])))

    async def update_user(self, call: ProxyCall) -> Answer[views.UserView]:
        body: requests.UpdateUser = call.body
        given, identity = changes(body), call.path["user_id"]
        given.pop("password", None)
        updated = self._accounts.get(identity)
        if body.password is not UNSET:
            await self._accounts.reset_password(identity, body.password, actor=actor(call))
        if given:
            updated = await self._accounts.update(identity, given, actor=actor(call))
        return Answer(content=views.user(updated))

    async def delete_user(self, call: ProxyCall) -> Answer[None]:
        await self._accounts.delete(call.path["user_id"], actor=actor(call))
        return done()

    # API tokens.

    async def tokens(self, call: ProxyCall) -> Answer[Listing[views.ApiTokenView]]:
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
        body: requests.CreateApiToken = call.body
        needed = OWN if body.role is OrganizationRole.OWNER else ADMINISTER
        self._known(call, body.organization_id, needed)
        role = self._access.role_in(call.caller, body.organization_id)
        assert role is not None
        answer = call.answering(
            lambda made: created(views.api_token(made.record, made.token), made.record, "api-tokens")
        )
        return answer(
            await self._tokens.create(
                body.organization_id, body.name, body.role, days=body.expires_in_days, by=role,
                creator=call.caller.name, actor=actor(call),
            )
        )  # fmt: skip

    def _known(self, call: ProxyCall, organization: str, permission: Permission) -> None:
        if self._access.locate(ORGANIZATION, organization) is None:
            raise NotFound("organization not found")
        self._access.check(
            call.caller, permission, organization_scope(organization), missing="organization"
        )  # fmt: skip

    async def revoke_token(self, call: ProxyCall) -> Answer[None]:
        await self._tokens.revoke(call.scope, call.path["api_token_id"], actor=actor(call))
        return done()
