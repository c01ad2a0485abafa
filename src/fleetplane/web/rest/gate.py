"""The gate of a family whose callers are principals with roles: who calls, and may they.

Whoever the door recognises may come: people who logged in, programs with a token, of one tenant or of none.
Families differ in their table of roles. A family with callers of another kind brings its own `Gate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fleetplane.kernel.access import EVERYWHERE, AccessTable, Grant, Permission, Principal, Role
from fleetplane.web.rest.routes import Headers

TENANT_PREFIX = "tenant/"


class PrincipalCaller(Protocol):
    """A caller that stands for a principal."""

    @property
    def name(self) -> str: ...

    @property
    def principal(self) -> Principal: ...


P = TypeVar("P", bound=PrincipalCaller)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCaller:
    """An operator, as the door recognised it."""

    principal: Principal

    @property
    def name(self) -> str:
        return self.principal.name

    @property
    def tenant(self) -> str:
        """The only tenant that the operator may act for; empty if it may act for any."""
        return self.principal.scope.removeprefix(TENANT_PREFIX)


class RoleGate(Generic[P]):
    """Admit callers by the permissions of their roles.

    Permissions are asked in `scope`, or where there is none in the caller's own.
    """

    def __init__(
        self,
        authenticate: Callable[[Headers], P],
        grants: Mapping[Role, Iterable[Grant]],
        *,
        scope: str | None = None,
    ) -> None:
        """`authenticate` takes the request's headers and raises `Unauthenticated`."""
        self.authenticate = authenticate
        self._table = AccessTable(grants)
        self._scope = scope

    def require_complete(self, permissions: Iterable[Permission]) -> None:
        """Refuse permissions that no role grants."""
        self._table.require_complete(permissions)

    def admit(self, caller: P, permission: Permission | None, _path: Mapping[str, str]) -> str:
        """The scope of what the path names; raises `PermissionDenied`."""
        scope = self._scope_of(caller)
        if permission is not None and not self._holds(caller, permission, scope):
            self._table.check(caller.principal, permission, scope)
        return scope

    def _holds(self, caller: P, permission: Permission, scope: str) -> bool:
        """Whether a caller with roles at several scopes has the permission at one of them."""
        return self._scope is None and scope == EVERYWHERE and self.scopes(caller, permission) != frozenset()

    def scopes(self, caller: P, permission: Permission) -> frozenset[str]:
        """The scopes at and below which the caller has the permission."""
        return self._table.scopes(caller.principal, permission)

    def may(self, caller: P, permission: Permission) -> bool:
        """Whether one of the caller's roles grants the permission."""
        return self._table.allows(caller.principal, permission, self._scope_of(caller))

    def check(self, caller: P, permission: Permission, scope: str) -> None:
        """Ask in another scope, such as one that a body names; raises `PermissionDenied`."""
        self._table.check(caller.principal, permission, scope)

    def _scope_of(self, caller: P) -> str:
        return caller.principal.scope if self._scope is None else self._scope


class PrincipalSource(Protocol):
    """Tells who shows a credential: the door, or the operators' tokens alone."""

    def of_header(self, authorization: str | None) -> Principal: ...


def acting(principal: Principal, asked: str | None) -> Principal:
    """One who holds roles at several scopes, as a family of tenants knows callers: of one tenant, or of none.

    Without `asked`, the tenant that a request names, it is the only tenant where there is one.
    """
    if not any(_concerns_tenants(one.scope) for one in principal.bindings):
        return Principal(name=principal.name, roles=principal.roles, scope=principal.scope)
    everywhere = principal.at(EVERYWHERE)
    if asked:
        there = principal.at(TENANT_PREFIX + asked)
        return everywhere if there.roles <= everywhere.roles else there
    if everywhere.roles:
        return everywhere
    tenants = tenants_of(principal)
    return principal.at(TENANT_PREFIX + tenants[0]) if len(tenants) == 1 else everywhere


def tenants_of(principal: Principal) -> Sequence[str]:
    """The tenants at which a principal holds roles, without those of one who holds them everywhere."""
    scopes = [one.scope for one in principal.bindings]
    if principal.roles:
        scopes.append(principal.scope)
    return sorted({scope.removeprefix(TENANT_PREFIX) for scope in scopes if _is_tenant(scope)})


def _is_tenant(scope: str) -> bool:
    return scope.startswith(TENANT_PREFIX) and "/" not in scope.removeprefix(TENANT_PREFIX)


def _concerns_tenants(scope: str) -> bool:
    return scope == EVERYWHERE or _is_tenant(scope)


def operator_gate(
    door: PrincipalSource,
    grants: Mapping[Role, Iterable[Grant]],
    *,
    tenant_headers: Sequence[str] | None = None,
) -> RoleGate[OperatorCaller]:
    """The gate of a family whose callers are operators.

    With `tenant_headers` it is a family of tenants: the first of them that a request has names the tenant for
    which a caller with roles at several acts.
    """

    def authenticate(headers: Headers) -> OperatorCaller:
        principal = door.of_header(headers.credential)
        if tenant_headers is not None:
            given = (headers.get(name) for name in tenant_headers)
            principal = acting(principal, next((text.strip() for text in given if text is not None), None))
        return OperatorCaller(principal=principal)

    return RoleGate(authenticate, grants)
