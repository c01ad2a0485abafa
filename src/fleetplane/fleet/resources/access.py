"""Who may see and do what through the API, and where.

The API asks two things about a caller: where a permission is granted, and where there is any binding.
A scope that no binding touches is "not found", whatever it holds; one that a binding touches without the
permission is "forbidden".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.resources import scopes
from fleetplane.kernel.access import AccessTable, Grant, Permission, Role
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.web.rest.gate import OperatorCaller, PrincipalCaller
from fleetplane.web.rest.routes import Headers


class ApiDoor(Protocol):
    """Recognises callers and knows what is granted to them."""

    def authenticate(self, headers: Headers) -> PrincipalCaller:
        """The caller; raises `Unauthenticated`."""
        ...

    def granted(self, caller: PrincipalCaller, permission: Permission) -> Collection[str]:
        """Scopes at and below which the caller has a permission."""
        ...

    def bound(self, caller: PrincipalCaller) -> Collection[str]:
        """Scopes at which the caller has any role."""
        ...


class BoundDoor:
    """Whoever the door of people knows, with the roles that they hold at scopes."""

    def __init__(self, door: Authenticators, grants: Iterable[Mapping[Role, Iterable[Grant]]]) -> None:
        """`grants` are those of every running domain."""
        self._door = door
        merged: dict[Role, list[Grant]] = {}
        for table in grants:
            for role, granted in table.items():
                merged.setdefault(role, []).extend(granted)
        self._table = AccessTable(merged)

    def authenticate(self, headers: Headers) -> OperatorCaller:
        return OperatorCaller(principal=self._door.of_header(headers.credential))

    def granted(self, caller: PrincipalCaller, permission: Permission) -> Collection[str]:
        stored = self._table.scopes(caller.principal, permission)
        return self._paths(stored)

    def _paths(self, stored: Iterable[str]) -> Collection[str]:
        """A scope that lies deeper than the tree goes, or is no more, has no path and gives nothing."""
        return sorted({path for scope in stored if (path := self._door.tree.path(scope)) is not None})

    def bound(self, caller: PrincipalCaller) -> Collection[str]:
        principal = caller.principal
        stored = {principal.scope} if principal.roles or not principal.bindings else set()
        stored.update(one.scope for one in principal.bindings)
        return self._paths(stored)


class ApiGate:
    """Recognises callers for the route table; what they may see is decided by object, in handlers."""

    def __init__(self, door: ApiDoor) -> None:
        self._door = door

    def authenticate(self, headers: Headers) -> PrincipalCaller:
        return self._door.authenticate(headers)

    def admit(self, _caller: Any, _permission: Permission | None, _path: Mapping[str, str]) -> str:
        return ""


class Sight:
    """What one caller may see, as of now. Made for each request, since bindings change."""

    def __init__(self, door: ApiDoor, caller: PrincipalCaller) -> None:
        self._door = door
        self._caller = caller
        self.caller_name = caller.name
        self.bound = tuple(door.bound(caller))
        """Scopes at which the caller has any role."""
        self._granted: dict[Permission, tuple[str, ...]] = {}

    def granted(self, permission: Permission) -> tuple[str, ...]:
        """Scopes at and below which the caller has a permission."""
        if permission not in self._granted:
            self._granted[permission] = tuple(self._door.granted(self._caller, permission))
        return self._granted[permission]

    def may(self, permission: Permission, scope: str) -> bool:
        """Whether the caller has a permission at a scope."""
        return scopes.covered(self.granted(permission), scope)

    def touches(self, permission: Permission, scope: str) -> bool:
        """Whether the caller has a permission at a scope, or somewhere below it."""
        return any(scopes.touches(one, scope) for one in self.granted(permission))

    def sees(self, permissions: Collection[Permission], scope: str) -> bool:
        """Whether the caller could see something for which one of the permissions is enough."""
        return any(self.touches(permission, scope) for permission in permissions)

    def check_list(self, permissions: Collection[Permission], scope: str) -> None:
        """Refuse to list at a scope where the caller could see nothing of the resource."""
        if self.sees(permissions, scope):
            return
        self.check_touches(scope)
        raise self._forbidden(permissions, scope)

    def check_touches(self, scope: str) -> None:
        """Refuse a scope about which the caller may not know anything."""
        if not any(scopes.touches(one, scope) for one in self.bound):
            raise NotFound(f"there is no scope {scope}", field="scope")

    def check_do(self, permission: Permission, scope: str) -> None:
        """Refuse what the caller may not do to an object that it sees."""
        if not self.may(permission, scope):
            raise self._forbidden((permission,), scope)

    def _forbidden(self, permissions: Collection[Permission], scope: str) -> PermissionDenied:
        needed = " or ".join(sorted(permissions))
        return PermissionDenied(
            f"{self._caller.name} has no permission {needed} at {scope}",
            hint="have a role bound that includes it",
            details={"permission": needed},
        )
