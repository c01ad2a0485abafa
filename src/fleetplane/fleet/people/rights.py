"""Who may give what to whom, and why somebody may do something. Nothing here is written.

Nobody gives what they do not hold: a role is given at a scope by one who manages people there and has every
permission of the role there. So an administrator makes administrators, and only an owner makes owners.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fleetplane.fleet.people.scopes import ScopeTree
from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.catalogue import Catalogue
from fleetplane.fleet.resources.declaration import READING, ResourceVerb
from fleetplane.kernel.access import (
    AccessTable,
    Binding,
    Grant,
    Permission,
    Principal,
    Role,
    built_in_grants,
)
from fleetplane.kernel.errors import InvalidArgument, NotFound, PermissionDenied

READ = Permission("people.read")
"""Accounts, bindings, tokens and sessions, by those who have it at their scope."""
MANAGE = Permission("people.manage")
SELF = Permission("people.self")
"""What everybody may do about themselves; handlers tell what is somebody else's that it is not there."""
GRANTS: Mapping[Role, Iterable[Grant]] = built_in_grants(viewer=(SELF,), admin=(READ, MANAGE))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRole:
    """A role that somebody holds, where, and what gave it."""

    role: str
    scope: str
    """A path, or the stored scope where the tree has none for it."""
    origin: str


_WRITING = frozenset({"create", "put", "replace", "patch", "edit", "apply", "delete"})


def permission_of(catalogue: Catalogue, verb: str, kind: str) -> Permission:
    """The permission that a verb or action of the resource API asks for; raises `NotFound`."""
    resource = catalogue.named(kind).resource
    for action in resource.actions:
        if action.name == verb:
            return action.permission
    if verb in {*READING, ResourceVerb.EXPLAIN}:
        return resource.permission
    if verb in _WRITING and resource.write is not None:
        return resource.write.permission
    raise NotFound(f"{resource.plural} cannot be asked to {verb[:64]!r}", field="verb")


class Rights:
    def __init__(
        self, tree: ScopeTree, grants: Iterable[Mapping[Role, Iterable[Grant]]], roles: Collection[Role]
    ) -> None:
        """`grants` are those of every domain of this server, `roles` those that can be given."""
        self._tree = tree
        self.roles = frozenset(roles)
        self._permissions: dict[Role, set[Permission]] = {}
        merged: dict[Role, list[Grant]] = {}
        for table in grants:
            for role, granted in table.items():
                rows = tuple(granted)
                merged.setdefault(role, []).extend(rows)
                self._permissions.setdefault(role, set()).update(one.permission for one in rows)
        self.table = AccessTable(merged)

    @property
    def permissions(self) -> frozenset[Permission]:
        """Every permission that some role which can be given has."""
        return frozenset(permission for role in self.roles for permission in self._permissions.get(role, ()))

    def may(self, principal: Principal, permission: Permission, path: str) -> bool:
        """Whether a principal has a permission at a path, whatever domains have there."""
        return all(self.table.allows(principal, permission, scope) for scope in self._tree.stored(path))

    def touches(self, principal: Principal, path: str) -> bool:
        """Whether a principal holds anything at a path, above or below it."""
        return any(
            scopes.touches(held.scope, path)
            for held in self.held(principal)
            if held.scope.startswith(scopes.ROOT)
        )

    def check_known(self, principal: Principal, path: str) -> None:
        """Refuse a path of which the caller may not know anything, as if it were not there."""
        if not self.touches(principal, path):
            raise NotFound(f"there is no scope {path}", field="scope")

    def check_give(self, principal: Principal, role: str, path: str) -> None:
        """Refuse to give what the giver does not hold."""
        if role not in self.roles:
            known = ", ".join(sorted(self.roles))
            raise InvalidArgument(f"there is no role {role[:64]!r}; there are {known}", field="role")
        self.check_known(principal, path)
        self.check(principal, MANAGE, path)
        lacking = sorted(
            permission
            for permission in self._permissions.get(Role(role), ())
            if not self.may(principal, permission, path)
        )
        if lacking:
            raise PermissionDenied(
                f"{principal.name} may not give {role} at {path}: it includes {lacking[0]}",
                hint="a role is given by one who has everything that it includes",
                details={"permission": lacking[0]},
            )

    def check_holds(self, principal: Principal, held: Binding) -> None:
        """Refuse one who has not everything that another holds by a role of a domain."""
        for permission in sorted(self._permissions.get(held.role, ())):
            if not self.table.allows(principal, permission, held.scope):
                raise PermissionDenied(
                    f"{principal.name} may not decide about one who is {held.role}"
                    f" at {self._shown(held.scope)}: it includes {permission}",
                    hint="ask one who has everything that the other person has",
                    details={"permission": permission},
                )

    def check(self, principal: Principal, permission: Permission, path: str) -> None:
        if not self.may(principal, permission, path):
            raise PermissionDenied(
                f"{principal.name} may not {permission} at {path}",
                hint="ask for a role at this scope that includes it",
                details={"permission": permission},
            )

    def held(self, principal: Principal) -> list[HeldRole]:
        """What a principal holds; a path that stands for scopes of several domains is told once."""
        found = [
            HeldRole(role=role, scope=self._shown(principal.scope), origin=principal.name)
            for role in sorted(principal.roles)
        ]
        found += [
            HeldRole(role=one.role, scope=self._shown(one.scope), origin=one.origin)
            for one in principal.bindings
        ]
        return sorted(set(found), key=lambda one: (one.scope, one.role, one.origin))

    def why(self, principal: Principal, permission: Permission, path: str) -> list[HeldRole]:
        """What gives a principal a permission at a path."""
        stored = self._tree.stored(path)
        found = [
            HeldRole(role=cause.role, scope=self._shown(cause.scope), origin=cause.origin)
            for cause in self.table.causes(principal, permission)
            if any(cause.scope in ("", scope) or scope.startswith(f"{cause.scope}/") for scope in stored)
        ]
        return sorted(set(found), key=lambda one: (one.scope, one.role, one.origin))

    def _shown(self, scope: str) -> str:
        return self._tree.path(scope) or scope
