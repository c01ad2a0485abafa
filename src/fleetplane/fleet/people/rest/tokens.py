"""Routes of tokens of programs and of sessions: tokens are made with roles at one scope, shown once, revoked.

Sessions are logins of accounts of this installation, and the open logins of every domain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.account_kind import subject_of
from fleetplane.fleet.people.logins import TokenPair, VerifiedLogin
from fleetplane.fleet.people.own_accounts import POLICY
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rights import MANAGE, READ, SELF
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.identity.tokens import TokenRecord
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

SESSIONS = RouteGroup("Sessions")
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
        yield SESSIONS.get("/sessions", self.sessions)
        yield SESSIONS.delete("/sessions/{id}", self.end_session, SELF, status=204)

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


TAG = RouteGroup("Tokens")
TOKEN_LIFE_LIMIT_SECONDS = 10 * 365 * 86_400
ROLES_LIMIT = 64
"""Named at once: what its maker may give is looked up for each."""
_TOKEN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+:-]{0,127}")
"""Nothing by which the audit log tells an actor from what its write was signed with."""


class TokenRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def routes(self) -> Iterator[Route]:
        yield TAG.get("/tokens", self.tokens, READ)
        yield TAG.post(
            "/tokens", self.make_token, MANAGE, body=shapes.TokenBody, status=201, recheck=self._check_make
        )
        yield TAG.delete("/tokens/{name}", self.revoke_token, MANAGE, status=204)

    def _ours(self) -> list[tuple[TokenRecord, str]]:
        """Tokens with the paths at which they hold; domains list those that they keep for themselves."""
        return [
            (record, path)
            for record in self._people.operators.tokens.records()
            if record.roles and (path := self._people.door.tree.path(record.scope)) is not None
        ]

    async def tokens(self, call: PeopleCall) -> Answer[shapes.TokenList]:
        """List tokens of programs; none can be read again."""
        found = [_token(one, path) for one, path in self._ours() if self._people.may(call, READ, path)]
        return Answer(content=shapes.TokenList(items=found))

    def _check_make(self, call: PeopleCall) -> None:
        """Also before a kept answer, which has the token in it, is given once more."""
        body: shapes.TokenBody = call.body
        path = scopes.parsed(body.scope)
        if not _TOKEN_NAME.fullmatch(body.name):
            raise InvalidArgument(
                "has 1 to 128 of a-z, A-Z, 0-9 and . _ @ + : -, and begins with a letter or digit",
                field="name",
            )
        if not body.roles:
            raise InvalidArgument("needs at least one role", field="roles")
        if not 1 <= body.expires_in_seconds <= TOKEN_LIFE_LIMIT_SECONDS:
            raise InvalidArgument(
                f"is between 1 and {TOKEN_LIFE_LIMIT_SECONDS} seconds", field="expiresInSeconds"
            )
        if len(body.roles) > ROLES_LIMIT:
            raise InvalidArgument(f"has {len(body.roles)} roles, more than {ROLES_LIMIT}", field="roles")
        for role in body.roles:
            self._people.rights.check_give(call.caller.principal, role, path)
        self._people.check_above(call, f"token/{body.name}")

    async def make_token(self, call: PeopleCall) -> Answer[shapes.ShownToken]:
        """Make a token with some roles at one scope, which ends by itself; shown once."""
        body: shapes.TokenBody = call.body
        path = scopes.parsed(body.scope)
        self._check_make(call)
        stored = [
            one for one in self._people.door.tree.stored(path) if self._people.door.tree.path(one) == path
        ]
        minted = self._people.operators.tokens.mint(
            body.name,
            roles=frozenset(Role(role) for role in body.roles),
            scope=stored[-1] if path.count("/") > 2 else stored[0],
            life_seconds=float(body.expires_in_seconds),
        )
        answer = Answer(content=_token(minted.record, path, token=minted.token))
        call.answering(lambda _: answer)
        await self._people.operators.tokens.write(minted, actor=call.signed(call.caller.name))
        return answer

    def _check_revoke(self, call: PeopleCall, record: TokenRecord, path: str) -> None:
        """Whoever revokes a token must hold what it holds there: administrators do not cut owners off."""
        held = {str(role) for role in record.roles} | {
            one.spec.role
            for one in self._people.bindings.of((f"token/{record.name}",))
            if scopes.covers(path, one.spec.scope)
        }
        for role in sorted(
            held & self._people.rights.roles
        ):  # one that no domain declares any more has nothing
            self._people.rights.check_give(call.caller.principal, role, path)

    async def revoke_token(self, call: PeopleCall) -> Answer[None]:
        """Revoke a token."""
        name = call.path["name"]
        found = next(((one, path) for one, path in self._ours() if one.name == name), None)
        missing = f"there is no token {name[:64]!r}"
        if found is None:
            raise NotFound(missing, field="name")
        self._people.check_at(call, found[1], missing)
        self._check_revoke(call, *found)
        await run_to_completion(self._revoked(name, actor=call.caller.name))
        return Answer(content=None)

    async def _revoked(self, name: str, *, actor: str) -> None:
        await self._people.operators.tokens.revoke(name, actor=actor)
        await self._people.bindings.forget(f"token/{name}", actor=actor)


def _token(record: TokenRecord, path: str, *, token: str = "") -> shapes.ShownToken:
    return shapes.ShownToken(
        name=record.name,
        roles=sorted(record.roles),
        scope=path,
        created_at=spelled(record.created_at_ns),
        expires_at=spelled_or_null(record.expires_at_ns),
        token=token,
    )
