"""What operators of edge daemons may do, and for which tenant they act.

A token's roles are the documented scopes themselves, or `edge.admin` for all of them. A token of
one tenant acts for that tenant, whatever its holder says; one of no tenant must say for which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetplane.domains.edge.kinds import check_tenant
from fleetplane.kernel.access import Grant, Permission, Role, built_in_grants
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.web.rest.gate import OperatorCaller
from fleetplane.web.rest.routes import Headers

ENROLL = Permission("aegis.edge.enroll")
HOSTS_READ = Permission("aegis.edge.hosts.read")
HOSTS_WRITE = Permission("aegis.edge.hosts.write")
GROUPS_WRITE = Permission("aegis.edge.groups.write")
FLEET_READ = Permission("aegis.edge.fleet.read")
FLEET_MANAGE = Permission("aegis.edge.fleet.manage")
CLUSTER = Permission("aegis.edge.cluster.manage")
"""What concerns all tenants; only for tokens of none."""
PERMISSIONS = (ENROLL, HOSTS_READ, HOSTS_WRITE, GROUPS_WRITE, FLEET_READ, FLEET_MANAGE, CLUSTER)

ADMIN = Role("edge.admin")
GRANTS: Mapping[Role, Iterable[Grant]] = {
    ADMIN: tuple(Grant(permission=permission) for permission in PERMISSIONS),
    **{Role(permission): (Grant(permission=permission),) for permission in PERMISSIONS},
    **built_in_grants(
        viewer=(HOSTS_READ, FLEET_READ),
        operator=(HOSTS_WRITE, GROUPS_WRITE, FLEET_MANAGE),
        admin=(ENROLL, CLUSTER),
    ),
}
ROLES = tuple(GRANTS)

TENANT_HEADERS = ("x-aegis-tenant", "x-tenant-id")


def asked_tenant(headers: Headers) -> str | None:
    """The tenant that a request names; both headers mean the same, the first is the newer."""
    for header in TENANT_HEADERS:
        if (given := headers.get(header)) is not None:
            return check_tenant(given.strip(), field=header)
    return None


def acting_for(caller: OperatorCaller, headers: Headers) -> str:
    """The tenant that a request is about."""
    tenant = seeing(caller, headers)
    if tenant is None:
        raise InvalidArgument(
            "is required with a token of no tenant; name the tenant in this header", field="x-aegis-tenant"
        )
    return tenant


def forbidden_switch() -> PermissionDenied:
    return PermissionDenied(
        "this token acts for one tenant, and not for that one", details={"cause": "forbidden_tenant_switch"}
    )


def require_everyone(caller: OperatorCaller) -> None:
    """Refuse a tenant's token what concerns all of them."""
    if caller.tenant:
        raise PermissionDenied(
            f"this concerns all tenants, and the token is of {caller.tenant!r}",
            hint="use a token of no tenant",
        )


def seeing(caller: OperatorCaller, headers: Headers) -> str | None:
    """The tenant whose things a request may see; None for those of all."""
    asked = asked_tenant(headers)
    if caller.tenant and asked not in (None, caller.tenant):
        raise forbidden_switch()
    return caller.tenant or asked
