"""Console sessions: logins that a browser keeps in a cookie.

The session of an account is a login like any other: it is listed, ended, and ends with its account. The
cookie is the login's id under a MAC with a key of its own, so that no access or refresh token passes for
it, or it for them. Sessions of tokens, and links that open one, are those of `token_sessions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.account_kind import AccountSpec, subject_of
from fleetplane.fleet.people.accounts import Authenticated
from fleetplane.fleet.people.door import Admitted, Authenticators
from fleetplane.fleet.people.own_accounts import OwnAccounts, OwnLogins, admitted
from fleetplane.fleet.people.refresh_tokens import RotatingRefresh
from fleetplane.fleet.people.token_sessions import MARK, OpenedSession, TokenSessions
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import bearer_of
from fleetplane.kernel.resources import Nothing
from fleetplane.kernel.store import Store
from fleetplane.web.rest import console
from fleetplane.web.rest.routes import Answer, Call, Route, RouteGroup

KEY = "people/console-key"
_ROUTES = RouteGroup("Console")


class ConsoleSessions:
    """See the module's description. `load` comes before everything else."""

    def __init__(
        self, door: Authenticators, accounts: OwnAccounts, logins: OwnLogins, tokens: TokenSessions
    ) -> None:
        self._door = door
        self._accounts = accounts
        self._logins = logins
        self._tokens = tokens
        self._cookies: RotatingRefresh | None = None
        door.console = self.recognise

    async def load(self, store: Store, master: MasterKey, clock: Clock) -> None:
        """Load the key of cookies, or make it the first time."""
        self._cookies = await RotatingRefresh.load_or_create(store, master, clock, secret=KEY)

    def recognise(self, cookie: str) -> Admitted:
        """Whose session it is; raises `Unauthenticated`."""
        if cookie.startswith(MARK):
            return self._tokens.recognise(cookie)
        assert self._cookies is not None, "the key is loaded before anyone can ask"
        try:
            login, _ = self._cookies.read(cookie)
        except Unauthenticated as error:
            raise Unauthenticated("the session is not known", details={"cause": "unknown session"}) from error
        return admitted(self._logins.standing(login, within_seconds=console.SESSION_SECONDS))

    async def begin(
        self,
        found: Authenticated[AccountSpec, Nothing],
        *,
        groups: tuple[str, ...] = (),
        ends_at_ns: int | None = None,
    ) -> str:
        """Open a session of somebody who proved who they are; the cookie's value."""
        assert self._cookies is not None, "the key is loaded before anyone can ask"
        name = subject_of(found.account.name)
        pair = await self._logins.open(
            found.account, actor=name, still_good=found.still_good, groups=groups, ends_at_ns=ends_at_ns
        )
        return self._cookies.issue(self._logins.login_in(pair.access), 0, {})

    def routes(self) -> Iterator[Route]:
        yield _ROUTES.post("/console", self.open, public=True, body=shapes.LoginBody)
        # The handler itself checks the token that is traded, which is no session's.
        yield _ROUTES.post("/console/token", self.trade, public=True)
        yield _ROUTES.post("/console/link", self.redeem, public=True, body=shapes.LinkBody)
        yield _ROUTES.get("/console", self.show)
        yield _ROUTES.delete("/console", self.close, status=204)

    async def open(self, call: Call[Any]) -> Answer[shapes.ConsoleSession]:
        """Log in with a browser: the session is a cookie that no script can read."""
        body: shapes.LoginBody = call.body
        console.check_same_origin(call.headers.get)
        found = await self._accounts.authenticate(body.name, body.password, address=call.address)
        name = subject_of(found.account.name)
        return _begun(OpenedSession(name=name, cookie=await self.begin(found)), call)

    async def trade(self, call: Call[Any]) -> Answer[shapes.ConsoleSession]:
        """Trade the bearer token of this request for a session."""
        console.check_same_origin(call.headers.get)
        return _begun(await self._tokens.trade(bearer_of(call.headers.get("authorization"))), call)

    async def redeem(self, call: Call[Any]) -> Answer[shapes.ConsoleSession]:
        """Open the session of a link, which is good once."""
        body: shapes.LinkBody = call.body
        console.check_same_origin(call.headers.get)
        return _begun(await self._tokens.redeem(body.code), call)

    async def show(self, call: Call[Any]) -> Answer[shapes.ConsoleSession]:
        """Tell whose session it is, and the CSRF token that changes need."""
        session = self._session(call)
        return Answer(
            content=shapes.ConsoleSession(name=call.caller.name, csrf_token=console.csrf_of(session))
        )

    async def close(self, call: Call[Any]) -> Answer[None]:
        """End the session."""
        session = self._session(call)
        if session.startswith(MARK):
            await self._tokens.close(session, actor=call.caller.name)
        else:
            verified: Any = self.recognise(session).caller
            await self._logins.close(verified.account.name, only=verified.login, actor=call.caller.name)
        return Answer(
            content=None, headers={"set-cookie": console.set_cookie("", secure=call.headers.secure)}
        )

    def _session(self, call: Call[Any]) -> str:
        scheme, _, session = (call.headers.credential or "").partition(" ")
        if scheme != console.SCHEME:
            raise InvalidArgument("this request has no console session", field="cookie")
        return session


def _begun(opened: OpenedSession, call: Call[Any]) -> Answer[shapes.ConsoleSession]:
    return Answer(
        content=shapes.ConsoleSession(name=opened.name, csrf_token=console.csrf_of(opened.cookie)),
        headers={"set-cookie": console.set_cookie(opened.cookie, secure=call.headers.secure)},
    )
