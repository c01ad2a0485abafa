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
from fleetplane.rpc import Needs
from fleetplane.web.rest.routes import Answer, Route

TAG = "Sessions"
LOGIN_TAG = "Logging in"


class SessionRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def login_routes(self) -> Iterator[Route]:
        yield Route(
            method="POST",
            path="/login",
            handler=self.login,
            needs=Needs.WRITES,
            tag=LOGIN_TAG,
            public=True,
            summary="Log an account of this installation in",
            body=shapes.LoginBody,
            answer=shapes.LoginTokens,
        )
        yield Route(
            method="POST",
            path="/refresh",
            handler=self.refresh,
            needs=Needs.WRITES,
            tag=LOGIN_TAG,
            public=True,
            summary="Trade a refresh token, which is good once, for the next pair",
            body=shapes.RefreshBody,
            answer=shapes.LoginTokens,
        )
        yield Route(
            method="POST",
            path="/logout",
            handler=self.logout,
            needs=Needs.WRITES,
            tag=LOGIN_TAG,
            summary="End the login that the caller's token stems from",
            status=204,
        )

    async def login(self, call: PeopleCall) -> Answer[shapes.LoginTokens]:
        body: shapes.LoginBody = call.body
        found = await self._people.accounts.authenticate(body.name, body.password, address=call.address)
        actor = subject_of(found.account.name)
        return _tokens(
            await self._people.logins.open(found.account, actor=actor, still_good=found.still_good)
        )

    async def refresh(self, call: PeopleCall) -> Answer[shapes.LoginTokens]:
        body: shapes.RefreshBody = call.body
        return _tokens(await self._people.logins.refresh(body.refresh_token, actor=POLICY.actor))

    async def logout(self, call: PeopleCall) -> Answer[None]:
        verified = self._people.door.recognise_header(call.headers.credential).caller
        if not isinstance(verified, VerifiedLogin) or not call.caller.name.startswith("account/"):
            raise InvalidArgument("this is not the token of a login here", hint="log out where you logged in")
        await self._people.logins.close(verified.account.name, only=verified.login, actor=call.caller.name)
        return Answer(content=None)

    def routes(self) -> Iterator[Route]:
        yield Route(
            method="GET",
            path="/sessions",
            handler=self.sessions,
            needs=Needs.STORE,
            tag=TAG,
            summary="List open logins: everybody's for who manages people, else the caller's own",
            answer=shapes.SessionList,
        )
        yield Route(
            method="DELETE",
            path="/sessions/{id}",
            handler=self.end_session,
            needs=Needs.WRITES,
            tag=TAG,
            permission=SELF,
            summary="End a login, and every token that stems from it",
            status=204,
        )

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
        return Answer(content=shapes.SessionList(items=self._visible(call)))

    async def end_session(self, call: PeopleCall) -> Answer[None]:
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
