"""What people who look at instances over the web may see, and of which tenant.

There is one role, and it only reads. A token of one tenant shows that tenant, whatever its holder
says; one of no tenant must say which, with every request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetplane.domains.instances.configuration.validate import identifier_problem
from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.kernel.identity.operators import Operators
from fleetplane.web.routes import Headers

VIEW = Permission("instances.view")
VIEWER = Role("instances.viewer")
GRANTS: Mapping[Role, Iterable[Grant]] = {VIEWER: (Grant(permission=VIEW),)}
ROLES = tuple(GRANTS)

TENANT_HEADER = "x-tenant-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    principal: Principal

    @property
    def name(self) -> str:
        return self.principal.name

    @property
    def tenant(self) -> str:
        """The only one it may see; empty if it may see any."""
        return self.principal.scope.removeprefix("tenant/")


class Gatekeeper:
    """Who calls, and may they."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._table = AccessTable(GRANTS)
        self._table.require_complete((VIEW,))

    def authenticate(self, authorization: str | None) -> Caller:
        return Caller(principal=self._operators.of_header(authorization))

    def admit(self, caller: Caller, permission: Permission | None, _path: Mapping[str, str]) -> str:
        scope = caller.principal.scope
        if permission is not None:
            self._table.check(caller.principal, permission, scope)
        return scope


def seeing(caller: Caller, headers: Headers) -> str:
    """The tenant that a request is about."""
    asked = headers.get(TENANT_HEADER)
    if asked is None:
        if not caller.tenant:
            raise InvalidArgument("say of which tenant, in the header X-Tenant-Id", field=TENANT_HEADER)
        return caller.tenant
    asked = asked.strip()
    if caller.tenant:
        if asked != caller.tenant:  # says nothing about whether there is such a tenant
            raise PermissionDenied("this token is for one tenant, and not for that one")
        return caller.tenant
    if (problem := identifier_problem(asked)) is not None:
        raise InvalidArgument(problem, field=TENANT_HEADER)
    return asked
