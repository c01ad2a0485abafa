"""Accounts of this installation: listed with those of every domain, made, changed and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.account_kind import FAMILY, AccountSpec, subject_of
from fleetplane.fleet.people.door import origin_of
from fleetplane.fleet.people.own_accounts import vouched_by
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rights import MANAGE, READ
from fleetplane.fleet.resources import scopes
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

TAG = RouteGroup("Accounts")


class AccountRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def routes(self) -> Iterator[Route]:
        yield TAG.get("/accounts", self.accounts, READ)
        yield TAG.post(
            "/accounts",
            self.make_account,
            MANAGE,
            body=shapes.AccountBody,
            status=201,
            recheck=self._people.check_root,
        )
        yield TAG.patch("/accounts/{name}", self.change_account, MANAGE, body=shapes.AccountPatch)
        yield TAG.delete("/accounts/{name}", self.delete_account, MANAGE, status=204)

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
