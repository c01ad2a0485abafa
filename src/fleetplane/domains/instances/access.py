"""What people who use instances over the web may see and do, and of which tenant.

The one role of this domain's own only reads; the built-in ones do more. A token of one tenant shows that
tenant, whatever its holder says; one of no tenant sees those of all, or of the one that a request names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetplane.domains.instances.configuration.validate import identifier_problem
from fleetplane.kernel.access import Grant, Permission, Role, built_in_grants
from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.web.rest.gate import OperatorCaller
from fleetplane.web.rest.routes import Headers

VIEW = Permission("instances.view")
AS_OPERATOR = Permission("instances.operator")
AS_ADMIN = Permission("instances.admin")
VIEWER = Role("instances.viewer")
GRANTS: Mapping[Role, Iterable[Grant]] = {
    VIEWER: (Grant(permission=VIEW),),
    **built_in_grants(viewer=(VIEW,), operator=(AS_OPERATOR,), admin=(AS_ADMIN,)),
}
ROLES = tuple(GRANTS)

TENANT_HEADER = "x-tenant-id"


def acting_for(caller: OperatorCaller, headers: Headers) -> str:
    """The tenant that a request is about."""
    tenant = seeing(caller, headers)
    if tenant is None:
        raise InvalidArgument("is required with a token of no tenant: name the tenant", field=TENANT_HEADER)
    return tenant


def seeing(caller: OperatorCaller, headers: Headers) -> str | None:
    """The tenant whose things a request may see; None for those of all."""
    asked = headers.get(TENANT_HEADER)
    if asked is None:
        return caller.tenant or None
    asked = asked.strip()
    if caller.tenant:
        if asked != caller.tenant:  # says nothing about whether there is such a tenant
            raise PermissionDenied("this token is for one tenant, and not for that one")
        return caller.tenant
    if (problem := identifier_problem(asked)) is not None:
        raise InvalidArgument(problem, field=TENANT_HEADER)
    return asked
