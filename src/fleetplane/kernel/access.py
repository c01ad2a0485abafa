"""Which principal may do what in which scope.

One table from roles to grants, checked for completeness before the server starts: a
permission that some method asks for and no role grants is a mistake found at start, not a
door found shut (or open) at night. Knows no wire names and no transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NewType

from fleetplane.kernel.errors import PermissionDenied, SettingsError

Permission = NewType("Permission", str)
Role = NewType("Role", str)

EVERYWHERE = ""
"""The scope prefix that covers every scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who is calling, as the connection proved it."""

    name: str
    """Stable and unique, such as `local`, `token/ci` or `agent/i-0abc`; audited with every write."""
    roles: frozenset[Role]
    scope: str = EVERYWHERE
    """The principal acts only at or below this scope."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    permission: Permission
    scope: str = EVERYWHERE


def covers(prefix: str, scope: str) -> bool:
    """Whether `scope` is `prefix` or lies below it, by whole path segments."""
    return prefix == EVERYWHERE or scope == prefix or scope.startswith(prefix + "/")


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

    def allows(self, principal: Principal, permission: Permission, scope: str = EVERYWHERE) -> bool:
        if not covers(principal.scope, scope):
            return False
        roles = self._by_permission.get(permission, {})
        return any(covers(granted, scope) for role in principal.roles for granted in roles.get(role, ()))

    def check(self, principal: Principal, permission: Permission, scope: str = EVERYWHERE) -> None:
        if not self.allows(principal, permission, scope):
            raise PermissionDenied(
                f"{principal.name} may not {permission}" + (f" in {scope}" if scope else ""),
                details={"permission": permission},
            )
