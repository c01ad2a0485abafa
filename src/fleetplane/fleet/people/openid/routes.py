"""Signing in with an OpenID provider, in a browser: there, back, and a console session.

    GET /oidc            whether there is a provider, and what to call it
    GET /oidc/login      sends the browser to the provider
    GET /oidc/callback   where the provider sends it back to

The browser only ever goes back to this server's own address (`oidc.server_url`), and from there to a place of
the console. A session that a provider vouched for holds the groups that it told, and ends within a working
day, so that what changes at the provider is believed here by then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import structlog

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.console_sessions import ConsoleSessions
from fleetplane.fleet.people.openid import sign_in
from fleetplane.fleet.people.openid.provider import OpenIdProvider
from fleetplane.fleet.people.openid.used import UsedSignIns
from fleetplane.fleet.people.own_accounts import OwnAccounts
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, NotFound, PermissionDenied, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS
from fleetplane.rpc import Needs
from fleetplane.sections.openid import LOOPBACK, OpenIDSettings
from fleetplane.web.rest import console
from fleetplane.web.rest.routes import Answer, Call, Query, Route, RouteGroup

log = structlog.get_logger(__name__)

TAG = RouteGroup("OpenID Connect")
PATH = "/apis/v1/people/oidc"
CALLBACK = f"{PATH}/callback"
FOUND = 302
_ERROR = re.compile(r"[a-z_]{1,64}")


class OpenIDRoutes:
    """See the module's description."""

    def __init__(
        self,
        settings: OpenIDSettings,
        *,
        store: Store,
        master: MasterKey,
        clock: Clock,
        accounts: OwnAccounts,
        sessions: ConsoleSessions,
    ) -> None:
        self._settings = settings
        self._master = master
        self._clock = clock
        self._accounts = accounts
        self._sessions = sessions
        self._provider = OpenIdProvider(settings, clock) if settings.issuer else None
        self._own_address = settings.server_url.rstrip("/")
        self._used = UsedSignIns(store, clock)

    def __repr__(self) -> str:
        return f"<OpenIDRoutes {self._provider!r}>"

    def opened(self, addresses: Sequence[str]) -> None:
        """Learn where the web listener is, for servers whose address the settings do not tell."""
        if not self._own_address:
            own = (one for one in addresses if urlsplit(one).hostname in LOOPBACK)
            self._own_address = next(own, "").rstrip("/")

    def routes(self) -> Iterator[Route]:
        yield TAG.get("/oidc", self.show, public=True)
        yield TAG.get(
            "/oidc/login",
            self.begin,
            public=True,
            status=FOUND,
            query=(Query(name="next", summary="Where in the console to go then; /ui/ if not given"),),
        )
        yield TAG.get(
            "/oidc/callback",
            self.finish,
            public=True,
            status=FOUND,
            query=(
                Query(name="code", summary="Of the provider; good once"),
                Query(name="state", summary="Of the sign-in that this browser began"),
                Query(name="error", summary="Why the provider refused"),
                Query(name="iss", summary="The provider, where it says so (RFC 9207)"),
            ),
            open_query=True,
            needs=Needs.WRITES,
        )

    async def show(self, call: Call[Any]) -> Answer[shapes.OpenIDProvider]:  # noqa: ARG002  # the same for all
        """Tell whether people sign in with an OpenID provider, and what it is called."""
        known = self._provider is not None
        return Answer(
            content=shapes.OpenIDProvider(
                enabled=known,
                name=self._settings.shown_name if known else "",
                login=f"{PATH}/login" if known else "",
            )
        )

    async def begin(self, call: Call[Any]) -> Answer[None]:
        """Send the browser to the provider to sign in."""
        provider = self._known()
        pending = sign_in.begun(call.query.get("next", ""), self._clock)
        document = await provider.document()
        where = sign_in.authorisation_url(
            document.authorization_endpoint,
            pending,
            client_id=self._settings.client_id,
            redirect_uri=self._redirect_uri(),
            scopes=self._settings.scopes,
        )
        cookie = self._cookie(call, sign_in.sealed(pending, self._master))
        return Answer(content=None, headers={"location": where}, cookies=(cookie,))

    async def finish(self, call: Call[Any]) -> Answer[None]:
        """Finish a sign-in: where the provider sends the browser back to."""
        provider, state = self._known(), call.query.get("state", "")
        pending = sign_in.opened(
            call.headers.get("cookie"),
            state,
            self._master,
            now_ns=self._clock.now_ns(),
            secure=self._is_secure(call),
        )
        self._used.check(pending.state)
        if call.query.get("iss", self._settings.issuer) != self._settings.issuer:
            raise Unauthenticated("another provider answered", details={"cause": "issuer"})
        if error := call.query.get("error"):
            told = error if _ERROR.fullmatch(error) else "an error"
            raise PermissionDenied(f"the provider refused the sign-in: {told}", hint="sign in again")
        identity = await provider.identity(
            call.query.get("code", ""),
            verifier=pending.verifier,
            redirect_uri=self._redirect_uri(),
            nonce=pending.nonce,
        )
        await self._used.use(pending.state, ends_at_ns=pending.ends_at_ns)
        found = await self._accounts.of_identity(identity, may_create=self._settings.new_accounts)
        ends_at_ns = self._clock.now_ns() + console.SESSION_SECONDS * NS
        session = await self._sessions.begin(found, groups=identity.groups, ends_at_ns=ends_at_ns)
        log.info("people.oidc_login", account=found.account.name, groups=len(identity.groups))
        return Answer(
            content=None,
            headers={"location": pending.following, "referrer-policy": "no-referrer"},
            cookies=(
                console.set_cookie(session, secure=self._is_secure(call)),
                self._cookie(call, ""),
            ),
        )

    def _known(self) -> OpenIdProvider:
        if self._provider is None:
            raise NotFound("people do not sign in with an OpenID provider here", hint="see oidc.issuer")
        return self._provider

    def _redirect_uri(self) -> str:
        if not self._own_address:
            raise FailedPrecondition(
                "this server does not know at which address browsers reach it", hint="set oidc.server_url"
            )
        return self._own_address + CALLBACK

    async def sweep(self) -> None:
        """Forget sign-ins that can no longer be finished anyway."""
        await self._used.sweep()

    def _cookie(self, call: Call[Any], value: str) -> str:
        return sign_in.cookie(value, secure=self._is_secure(call))

    def _is_secure(self, call: Call[Any]) -> bool:
        return call.headers.secure or self._own_address.startswith("https:")
