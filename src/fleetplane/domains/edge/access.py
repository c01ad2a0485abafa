"""What operators of edge daemons may do, and for which tenant they act.

A token's roles are the documented scopes themselves, or `edge.admin` for all of them. A token of
one tenant acts for that tenant, whatever its holder says; one of no tenant must say for which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fleetplane.domains.edge.kinds import check_tenant, tenant_of
from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.kernel.identity.operators import Operators
from fleetplane.web.routes import Headers

ENROLL = Permission("aegis.edge.enroll")
HOSTS_READ = Permission("aegis.edge.hosts.read")
HOSTS_WRITE = Permission("aegis.edge.hosts.write")
GROUPS_WRITE = Permission("aegis.edge.groups.write")
FLEET_READ = Permission("aegis.edge.fleet.read")
FLEET_MANAGE = Permission("aegis.edge.fleet.manage")
PERMISSIONS = (ENROLL, HOSTS_READ, HOSTS_WRITE, GROUPS_WRITE, FLEET_READ, FLEET_MANAGE)

ADMIN = Role("edge.admin")
GRANTS: Mapping[Role, Iterable[Grant]] = {
    ADMIN: tuple(Grant(permission=permission) for permission in PERMISSIONS),
    **{Role(permission): (Grant(permission=permission),) for permission in PERMISSIONS},
}
ROLES = tuple(GRANTS)

TENANT_HEADERS = ("x-aegis-tenant", "x-tenant-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    principal: Principal

    @property
    def name(self) -> str:
        return self.principal.name

    @property
    def tenant(self) -> str:
        """The only one it may act for; empty if it may act for any."""
        return tenant_of(self.principal.scope) if self.principal.scope else ""


class Gatekeeper:
    """Who calls, and may they."""

    def __init__(self, operators: Operators) -> None:
        self._operators = operators
        self._table = AccessTable(GRANTS)
        self._table.require_complete(PERMISSIONS)

    def authenticate(self, authorization: str | None) -> Caller:
        return Caller(principal=self._operators.of_header(authorization))

    def admit(self, caller: Caller, permission: Permission | None, _path: Mapping[str, str]) -> str:
        scope = caller.principal.scope
        if permission is not None:
            self._table.check(caller.principal, permission, scope)
        return scope


def asked_tenant(headers: Headers) -> str | None:
    """The tenant that a request names; both headers mean the same, the first is the newer."""
    for header in TENANT_HEADERS:
        if (given := headers.get(header)) is not None:
            return check_tenant(given.strip(), field=header)
    return None


def acting_for(caller: Caller, headers: Headers) -> str:
    """The tenant that a request is about."""
    tenant = seeing(caller, headers)
    if tenant is None:
        raise InvalidArgument("say for which tenant, in the header X-Aegis-Tenant", field="x-aegis-tenant")
    return tenant


def forbidden_switch() -> PermissionDenied:
    return PermissionDenied(
        "this token acts for one tenant, and not for that one", details={"cause": "forbidden_tenant_switch"}
    )


def seeing(caller: Caller, headers: Headers) -> str | None:
    """The tenant whose things a request may see; None for those of all."""
    asked = asked_tenant(headers)
    if caller.tenant and asked not in (None, caller.tenant):
        raise forbidden_switch()
    return caller.tenant or asked
