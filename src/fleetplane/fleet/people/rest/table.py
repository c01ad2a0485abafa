"""`/apis/v1/people`: who somebody is, what they may do and why; accounts, tokens, bindings and sessions.

    GET    /whoami                           the caller, with every role and what gave it
    GET    /can-i?permission=|verb=&kind=    whether the caller may, and why
    POST   /login, /refresh, /logout         of accounts of this installation
    GET    /bindings   POST   DELETE /{id}   roles at scopes
    GET    /tokens     POST   DELETE /{name} programs
    GET    /accounts   POST   PATCH, DELETE /{name}
    GET    /sessions   DELETE /{id}          open logins, of whichever domain

What lies at a scope of which the caller may not know is not there. Tokens and sessions are in `tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.account_kind import FAMILY, AccountSpec, subject_of
from fleetplane.fleet.people.door import origin_of
from fleetplane.fleet.people.own_accounts import vouched_by
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rest.tokens import SessionRoutes, TokenRoutes
from fleetplane.fleet.people.rights import MANAGE, READ, HeldRole
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity.bindings import BindingRecord
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup, RouteTable

ACCOUNTS = RouteGroup("Accounts")


class AccountRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def routes(self) -> Iterator[Route]:
        yield ACCOUNTS.get("/accounts", self.accounts, READ)
        yield ACCOUNTS.post(
            "/accounts",
            self.make_account,
            MANAGE,
            body=shapes.AccountBody,
            status=201,
            recheck=self._people.check_root,
        )
        yield ACCOUNTS.patch("/accounts/{name}", self.change_account, MANAGE, body=shapes.AccountPatch)
        yield ACCOUNTS.delete("/accounts/{name}", self.delete_account, MANAGE, status=204)

    async def accounts(self, call: PeopleCall) -> Answer[shapes.AccountList]:
        """List everybody who can log in, by whichever domain's login, with what they hold."""
        self._people.rights.check(call.caller.principal, READ, scopes.ROOT)
        found = [
            shapes.ShownAccount(roles=self._bound(one.subject), **asdict(one))
            for one in self._people.door.directories.accounts()
        ]
        return Answer(content=shapes.AccountList(items=found))

    async def make_account(self, call: PeopleCall) -> Answer[shapes.ShownAccount]:
        """Make an account of this installation, which holds no role yet."""
        body: shapes.AccountBody = call.body
        self._people.check_root(call)
        spec = AccountSpec(
            login=body.name.strip().lower(),
            display_name=body.display_name,
            email=body.email,
            created_by=call.caller.name,
        )
        view = call.answering(lambda made: Answer(content=self._account(made.spec)))
        actor = call.signed(call.caller.name)
        return view(await self._people.accounts.create(spec, body.password, actor=actor))

    async def change_account(self, call: PeopleCall) -> Answer[shapes.ShownAccount]:
        """Change an account; a new password, or disabling it, ends its sessions."""
        body: shapes.AccountPatch = call.body
        name = call.path["name"].lower()
        self._people.check_root(call)
        self._people.check_above(call, subject_of(self._people.accounts.get(name).name))
        given = {"display_name": body.display_name, "email": body.email, "disabled": body.disabled}
        changes: dict[str, object] = {field: value for field, value in given.items() if value is not None}
        if body.disabled is not None:
            changes["disabled_by"] = ""
        changed = await self._people.accounts.change(
            name, changes, password=body.password, actor=call.caller.name
        )
        return Answer(content=self._account(changed.spec))

    async def delete_account(self, call: PeopleCall) -> Answer[None]:
        """Delete an account with its sessions and bindings."""
        name = call.path["name"].lower()
        self._people.check_root(call)
        self._people.check_above(call, subject_of(self._people.accounts.get(name).name))
        await self._people.accounts.delete(name, actor=call.caller.name)
        return Answer(content=None)

    def _account(self, spec: AccountSpec) -> shapes.ShownAccount:
        subject = subject_of(spec.login)
        return shapes.ShownAccount(
            subject=subject,
            name=spec.login,
            directory=spec.home or FAMILY,
            active=not spec.disabled,
            vouched_by=vouched_by(spec),
            users=spec.profiles,
            roles=self._bound(subject),
        )

    def _bound(self, subject: str) -> list[shapes.ShownRole]:
        bound = [
            shapes.ShownRole(role=one.spec.role, scope=one.spec.scope, origin=origin_of(one.spec))
            for one in self._people.bindings.of((subject,))
        ]
        path = self._people.door.tree.path
        given = [
            shapes.ShownRole(role=one.role, scope=path(one.scope) or one.scope, origin=one.origin)
            for one in self._people.door.by_profiles(subject)
        ]
        return [*bound, *given]


BINDINGS = RouteGroup("Bindings")
SUBJECTS = ("account/", "token/", "group/", "proxies-user/", "boards-user/")
SUBJECT_LIMIT = 300


class BindingRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def routes(self) -> Iterator[Route]:
        yield BINDINGS.get(
            "/bindings", self.bindings, READ, query=(Query(name="subject", summary="Only of this subject"),)
        )
        yield BINDINGS.post(
            "/bindings", self.bind, MANAGE, body=shapes.BindingBody, status=201, recheck=self._check_bind
        )
        yield BINDINGS.delete("/bindings/{id}", self.unbind, MANAGE, status=204)

    async def bindings(self, call: PeopleCall) -> Answer[shapes.BindingList]:
        """List who holds which role where, as far as the caller may know."""
        asked = call.query.get("subject")
        asked = None if asked is None else self._people.door.directories.subject(asked)
        found = [
            _binding(one)
            for one in self._people.bindings.all()
            if asked in (None, one.spec.subject) and self._people.may(call, READ, one.spec.scope)
        ]
        return Answer(content=shapes.BindingList(items=found))

    def _check_bind(self, call: PeopleCall) -> None:
        body: shapes.BindingBody = call.body
        path = scopes.parsed(body.scope)
        _check_subject(body.subject)
        self._people.rights.check_give(call.caller.principal, body.role, path)

    async def bind(self, call: PeopleCall) -> Answer[shapes.ShownBinding]:
        """Give a role at a scope."""
        body: shapes.BindingBody = call.body
        self._check_bind(call)
        view = call.answering(lambda made: Answer(content=_binding(made)))
        actor = call.signed(call.caller.name)
        return view(
            await self._people.bindings.give(
                self._people.door.directories.subject(body.subject),
                body.role,
                scopes.parsed(body.scope),
                actor=actor,
            )
        )

    async def unbind(self, call: PeopleCall) -> Answer[None]:
        """Take a role away."""
        found = self._people.bindings.get(call.path["id"])
        self._people.check_at(call, found.spec.scope, "there is no such binding")
        self._people.rights.check_give(call.caller.principal, found.spec.role, found.spec.scope)
        await self._people.bindings.take(found.name, actor=call.caller.name)
        return Answer(content=None)


def _check_subject(subject: str) -> None:
    kind, _, name = subject.partition("/")
    if f"{kind}/" not in SUBJECTS or not name or len(subject) > SUBJECT_LIMIT or not subject.isprintable():
        raise InvalidArgument(
            f"{subject[:64]!r} names nobody", field="subject", hint=f"begin with {', '.join(SUBJECTS)}"
        )


def _binding(found: BindingRecord) -> shapes.ShownBinding:
    spec = found.spec
    return shapes.ShownBinding(
        id=found.name,
        subject=spec.subject,
        role=spec.role,
        scope=spec.scope,
        created_by=spec.created_by,
        created_at=spelled(spec.created_at_ns),
    )


WHO = RouteGroup("Who")
PermissionOf = Callable[[str, str], Permission]
"""From a verb and a kind of the resource API to the permission that it asks for; raises `NotFound`."""


class WhoRoutes:
    def __init__(self, people: PeopleParts, permission_of: PermissionOf) -> None:
        self._people = people
        self._permission_of = permission_of

    def routes(self) -> Iterator[Route]:
        yield WHO.get("/whoami", self.whoami)
        yield WHO.get(
            "/can-i",
            self.can_i,
            query=(
                Query(name="permission", summary="A permission, such as boards.operate"),
                Query(name="verb", summary="Instead: a verb or action of the resource API, with `kind`"),
                Query(name="kind", summary="A resource, such as gpus"),
                Query(name="scope", summary="Where, such as /tenants/acme; / if not given"),
            ),
        )

    async def whoami(self, call: PeopleCall) -> Answer[shapes.WhoAmI]:
        """Tell who the caller is, with every role and what gave it."""
        principal = call.caller.principal
        subject = self._people.door.recognise_header(call.headers.credential).subject
        return Answer(
            content=shapes.WhoAmI(
                name=principal.name, subject=subject, roles=_roles(self._people.rights.held(principal))
            )
        )

    async def can_i(self, call: PeopleCall) -> Answer[shapes.MayI]:
        """Tell whether the caller may do something at a scope, and why."""
        principal, path = call.caller.principal, _path(call)
        permission = self._asked(call)
        because = self._people.rights.why(principal, permission, path)
        allowed = self._people.rights.may(principal, permission, path)
        return Answer(
            content=shapes.MayI(
                allowed=allowed,
                permission=permission,
                scope=path,
                because=_roles(because) if allowed else (),
            )
        )

    def _asked(self, call: PeopleCall) -> Permission:
        verb, kind, given = (call.query.get(name, "") for name in ("verb", "kind", "permission"))
        if given:
            if given not in self._people.rights.permissions:
                raise InvalidArgument(f"there is no permission {given[:64]!r}", field="permission")
            return Permission(given)
        if not verb or not kind:
            raise InvalidArgument("is required, or verb and kind are", field="permission")
        return self._permission_of(verb, kind)


def _path(call: PeopleCall) -> str:
    return scopes.parsed(call.query.get("scope", ""))


def _roles(held: Sequence[HeldRole]) -> list[shapes.ShownRole]:
    return [shapes.ShownRole(role=one.role, scope=one.scope, origin=one.origin) for one in held]


PREFIX = "/apis/v1/people"


def people_table(parts: PeopleParts, permission_of: PermissionOf, more: Sequence[Route] = ()) -> RouteTable:
    """Every route about people; `more` are those of console sessions."""
    sessions = SessionRoutes(parts)
    return RouteTable(
        PREFIX,
        (
            *WhoRoutes(parts, permission_of).routes(),
            *sessions.login_routes(),
            *BindingRoutes(parts).routes(),
            *TokenRoutes(parts).routes(),
            *AccountRoutes(parts).routes(),
            *sessions.routes(),
            *more,
        ),
        strict_queries=True,
    )
