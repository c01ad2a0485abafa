"""Bindings: who holds which role where."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rights import MANAGE, READ
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.identity.bindings import BindingRecord
from fleetplane.kernel.values.times import spelled
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

TAG = RouteGroup("Bindings")
SUBJECTS = ("account/", "token/", "group/", "proxies-user/", "boards-user/")
SUBJECT_LIMIT = 300


class BindingRoutes:
    def __init__(self, people: PeopleParts) -> None:
        self._people = people

    def routes(self) -> Iterator[Route]:
        yield TAG.get(
            "/bindings", self.bindings, READ, query=(Query(name="subject", summary="Only of this subject"),)
        )
        yield TAG.post(
            "/bindings", self.bind, MANAGE, body=shapes.BindingBody, status=201, recheck=self._check_bind
        )
        yield TAG.delete("/bindings/{id}", self.unbind, MANAGE, status=204)

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
