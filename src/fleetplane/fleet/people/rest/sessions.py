"""Logging accounts of this installation in and out, and open logins of whichever domain."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.account_kind import subject_of
from fleetplane.fleet.people.logins import TokenPair, VerifiedLogin
from fleetplane.fleet.people.own_accounts import POLICY
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rights import MANAGE, SELF
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

TAG = RouteGroup("Sessions")
LOGIN_TAG = RouteGroup("Logging in")


class SessionRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def login_routes(self) -> Iterator[Route]:
        yield LOGIN_TAG.post("/login", self.login, public=True, body=shapes.LoginBody)
        yield LOGIN_TAG.post("/refresh", self.refresh, public=True, body=shapes.RefreshBody)
        yield LOGIN_TAG.post("/logout", self.logout, status=204)

    async def login(self, call: PeopleCall) -> Answer[shapes.LoginTokens]:
        """Log an account of this installation in."""
        body: shapes.LoginBody = call.body
        found = await self._people.accounts.authenticate(body.name, body.password, address=call.address)
        actor = subject_of(found.account.name)
        return _tokens(
            await self._people.logins.open(found.account, actor=actor, still_good=found.still_good)
        )

    async def refresh(self, call: PeopleCall) -> Answer[shapes.LoginTokens]:
        """Trade a refresh token, which is good once, for the next pair."""
        body: shapes.RefreshBody = call.body
        return _tokens(await self._people.logins.refresh(body.refresh_token, actor=POLICY.actor))

    async def logout(self, call: PeopleCall) -> Answer[None]:
        """End the login that the caller's token stems from."""
        verified = self._people.door.recognise_header(call.headers.credential).caller
        if not isinstance(verified, VerifiedLogin) or not call.caller.name.startswith("account/"):
            raise InvalidArgument("this is not the token of a login here", hint="log out where you logged in")
        await self._people.logins.close(verified.account.name, only=verified.login, actor=call.caller.name)
        return Answer(content=None)

    def routes(self) -> Iterator[Route]:
        yield TAG.get("/sessions", self.sessions)
        yield TAG.delete("/sessions/{id}", self.end_session, SELF, status=204)

    def _visible(self, call: PeopleCall) -> list[shapes.ShownSession]:
        everybody = self._people.may(call, MANAGE, scopes.ROOT)
        own = self._people.door.recognise_header(call.headers.credential).subject
        return [
            shapes.ShownSession(
                id=one.id,
                directory=one.directory,
                subject=one.subject,
                name=one.name,
                expires_at=spelled(one.expires_at_ns),
            )
            for one in self._people.door.directories.logins()
            if everybody or one.subject == own
        ]

    async def sessions(self, call: PeopleCall) -> Answer[shapes.SessionList]:
        """List open logins: everybody's for who manages people, else the caller's own."""
        return Answer(content=shapes.SessionList(items=self._visible(call)))

    async def end_session(self, call: PeopleCall) -> Answer[None]:
        """End a login, and every token that stems from it."""
        if all(one.id != call.path["id"] for one in self._visible(call)):
            raise NotFound("there is no such session", field="id")
        await self._people.door.directories.end(call.path["id"], actor=call.caller.name)
        return Answer(content=None)


def _tokens(pair: TokenPair) -> Answer[shapes.LoginTokens]:
    return Answer(
        content=shapes.LoginTokens(
            access_token=pair.access, refresh_token=pair.refresh, expires_in_seconds=POLICY.access_seconds
        )
    )
