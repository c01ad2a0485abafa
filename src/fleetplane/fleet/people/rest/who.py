"""Who the caller is, what they may do, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fleetplane.fleet.people import shapes
from fleetplane.fleet.people.rest.parts import PeopleCall, PeopleParts
from fleetplane.fleet.people.rights import HeldRole
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.web.rest.routes import Answer, Query, Route, RouteGroup

TAG = RouteGroup("Who")
PermissionOf = Callable[[str, str], Permission]
"""From a verb and a kind of the resource API to the permission that it asks for; raises `NotFound`."""


class WhoRoutes:
    def __init__(self, people: PeopleParts, permission_of: PermissionOf) -> None:
        self._people = people
        self._permission_of = permission_of

    def routes(self) -> Iterator[Route]:
        yield TAG.get("/whoami", self.whoami)
        yield TAG.get(
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
