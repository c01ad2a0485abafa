"""Decide which principal may do what in which scope, and read and write the names of actors.

One table maps roles to grants. It is checked for completeness before the server starts: a permission
that a method requires and no role grants is found then. Knows no wire names and no transport.

An actor is the name of a caller in the audit log. The actor of a write that must happen once is signed
with the digest of its idempotency key; `who` is the name without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NewType

from fleetplane.kernel.errors import PermissionDenied, SettingsError

_ONCE = "&once="
"""Between an actor and the digest. No actor has it otherwise: what callers say is quoted there."""


def signed(actor: str, digest: str) -> str:
    return f"{actor}{_ONCE}{digest}"


def who(actor: str) -> str:
    return actor.partition(_ONCE)[0]


def digest_of(actor: str) -> str:
    """What it was signed with; empty if with nothing."""
    return actor.partition(_ONCE)[2]


Permission = NewType("Permission", str)
Role = NewType("Role", str)

EVERYWHERE = ""
"""The scope prefix that covers every scope."""


VIEWER, OPERATOR, ADMIN, OWNER = Role("viewer"), Role("operator"), Role("admin"), Role("owner")
BUILT_IN_ROLES = (VIEWER, OPERATOR, ADMIN, OWNER)
"""Roles that mean something in every domain, each with what the ones before it have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """A role that is held at a scope and everywhere below it."""

    role: Role
    scope: str = EVERYWHERE
    origin: str = ""
    """What gave it, for people who ask why somebody may do something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is calling, as the connection proved it."""

    name: str
    """Stable and unique, such as `local`, `token/ci` or `agent/i-0abc`; audited with every write."""
    roles: frozenset[Role]
    scope: str = EVERYWHERE
    """The principal's `roles` hold only at or below this scope."""
    bindings: tuple[Binding, ...] = ()
    """Further roles, each at a scope of its own."""

    def at(self, scope: str) -> Principal:
        """The same principal with the roles that it holds at one scope, and nothing elsewhere.

        For code that knows a single scope for each caller: what is held at several scopes is never added up.
        """
        held = set(self.roles) if covers(self.scope, scope) else set()
        held.update(one.role for one in self.bindings if covers(one.scope, scope))
        return Principal(name=self.name, roles=frozenset(held), scope=scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    permission: Permission
    scope: str = EVERYWHERE


def covers(prefix: str, scope: str) -> bool:
    """Whether `scope` is `prefix` or lies below it, by whole path segments."""
    return prefix == EVERYWHERE or scope == prefix or scope.startswith(prefix + "/")


def built_in_grants(
    *,
    viewer: Iterable[Permission] = (),
    operator: Iterable[Permission] = (),
    admin: Iterable[Permission] = (),
    owner: Iterable[Permission] = (),
) -> dict[Role, tuple[Grant, ...]]:
    """The rows of the built-in roles in a domain's table: what each adds to the one before it."""
    table: dict[Role, tuple[Grant, ...]] = {}
    held: tuple[Grant, ...] = ()
    for role, added in zip(BUILT_IN_ROLES, (viewer, operator, admin, owner), strict=True):
        held += tuple(Grant(permission=permission) for permission in added)
        table[role] = held
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessCause:
    """Why a principal may do something: the role that grants it, where it is held, and what gave it."""

    role: Role
    scope: str
    origin: str


@dataclass(slots=True)
class AccessTable:
    grants: Mapping[Role, Iterable[Grant]]
    _by_permission: dict[Permission, dict[Role, tuple[str, ...]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        collected: dict[Permission, dict[Role, list[str]]] = {}
        for role, grants in self.grants.items():
            for grant in grants:
                collected.setdefault(grant.permission, {}).setdefault(role, []).append(grant.scope)
        self._by_permission = {
            permission: {role: tuple(scopes) for role, scopes in roles.items()}
            for permission, roles in collected.items()
        }

    def require_complete(self, needed: Iterable[Permission]) -> None:
        """Refuse to go on when some needed permission is granted to nobody."""
        orphans = sorted(set(needed) - self._by_permission.keys())
        if orphans:
            raise SettingsError(
                f"no role grants {', '.join(orphans)}", hint="add it to a role in the access table"
            )

    def require_built_in(self, needed: Iterable[Permission]) -> None:
        """Refuse to go on when a permission that operators need is granted by no built-in role."""
        orphans = sorted(
            permission
            for permission in set(needed)
            if not self._by_permission.get(permission, {}).keys() & set(BUILT_IN_ROLES)
        )
        if orphans:
            raise SettingsError(
                f"no built-in role grants {', '.join(orphans)}",
                hint="say with `built_in_grants` which of viewer, operator, admin and owner has it first",
            )

    def allows(self, principal: Principal, permission: Permission, scope: str = EVERYWHERE) -> bool:
        roles = self._by_permission.get(permission, {})
        if covers(principal.scope, scope) and any(
            covers(granted, scope) for role in principal.roles for granted in roles.get(role, ())
        ):
            return True
        return any(
            covers(granted, scope)
            for one in principal.bindings
            if covers(one.scope, scope)
            for granted in roles.get(one.role, ())
        )

    def scopes(self, principal: Principal, permission: Permission) -> frozenset[str]:
        """The scopes at and below which a principal has a permission; empty if it has it nowhere."""
        return frozenset(
            granted if covers(cause.scope, granted) else cause.scope
            for cause in self.causes(principal, permission)
            for granted in self._by_permission[permission][cause.role]
            if covers(cause.scope, granted) or covers(granted, cause.scope)
        )

    def causes(self, principal: Principal, permission: Permission) -> tuple[AccessCause, ...]:
        """What gives a principal a permission somewhere, widest scope first."""
        roles = self._by_permission.get(permission, {})
        found = [
            AccessCause(role=role, scope=principal.scope, origin=principal.name)
            for role in sorted(principal.roles)
            if role in roles
        ]
        found += [
            AccessCause(role=one.role, scope=one.scope, origin=one.origin)
            for one in principal.bindings
            if one.role in roles
        ]
        return tuple(sorted(found, key=lambda cause: cause.scope.count("/") if cause.scope else -1))

    def check(self, principal: Principal, permission: Permission, scope: str = EVERYWHERE) -> None:
        if not self.allows(principal, permission, scope):
            raise PermissionDenied(
                f"{principal.name} may not {permission}" + (f" in {scope}" if scope else ""),
                details={"permission": permission},
            )
