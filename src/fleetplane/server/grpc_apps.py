"""One gRPC application for each listener, made of what the domains serve there.

Also ends the calls of callers who have lost the right to them while they ran.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NoReturn

import structlog

from fleetplane.domains.blueprint import Blueprint, Domain
from fleetplane.fleet.people.door import is_of_people
from fleetplane.kernel.access import AccessTable, Grant, Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity.certificates import peer_identity
from fleetplane.kernel.identity.revocation import Revoked
from fleetplane.rpc import (
    Authentication,
    Authenticator,
    CallGate,
    CallStatistics,
    Connection,
    FixedPrincipal,
    GrpcApp,
    MethodTable,
)
from fleetplane.rpc.introspection import HealthBoard, add_reflection, introspection_methods

log = structlog.get_logger(__name__)

LOCAL_PRINCIPAL = Principal(name="local", roles=frozenset({Role("local")}))
"""The principal of a caller at a socket that only this machine can reach."""
ANONYMOUS_PRINCIPAL = Principal(name="anonymous", roles=frozenset())
RIGHTS_SECONDS = 1.0
"""How long a call may go on after what allowed it was taken away; a look at a call takes microseconds."""


def compose(
    blueprints: Sequence[Blueprint],
    domains: Sequence[Domain],
    calls: CallStatistics,
    clock: Clock,
    health: HealthBoard,
    gate: CallGate | None = None,
) -> dict[str, GrpcApp]:
    """One application per gRPC listener; refuses a method without a row in the table.

    `gate` stands before every call, on a server that shares its database.
    """
    services = [service for domain in domains for service in domain.services]
    names = sorted({service.listener for service in services})
    table = MethodTable(
        [
            *(row for blueprint in blueprints for row in blueprint.methods),
            *(row for service in services for row in service.rows),
            *(row for name in names for row in introspection_methods(name)),
        ]
    )
    grants: dict[Role, list[Grant]] = {}
    for blueprint in blueprints:
        for role, granted in blueprint.grants.items():
            grants.setdefault(role, []).extend(granted)
    apps = {}
    for name in names:
        authenticators: dict[Authentication, Authenticator] = {
            Authentication.ANONYMOUS: FixedPrincipal(ANONYMOUS_PRINCIPAL),
            Authentication.LOCAL: FixedPrincipal(LOCAL_PRINCIPAL),
        }
        for domain in domains:
            authenticators.update(domain.authenticators.get(name, {}))
        app = GrpcApp(
            listener=name,
            table=table,
            access=AccessTable(grants),
            authenticators=authenticators,
            clock=clock,
            statistics=calls,
            gate=gate,
        )
        for service in services:
            if service.listener == name:
                app.add_service(service.descriptor, service.servicer, raw_requests=service.raw_requests)
        health.add_to(app)
        add_reflection(app)
        app.seal()
        health.add_anywhere(app)
        apps[name] = app
    return apps


def cut_off(apps: Iterable[GrpcApp], revoked: Revoked) -> None:
    """End every call that a revoked principal, or one with a revoked certificate, has running anywhere."""
    for app in apps:
        if revoked.principal is not None:
            app.end_calls_of(revoked.principal)
        else:
            app.end_calls_where(lambda connection: _serial_of(connection) == revoked.serial)


async def keep_to_rights(apps: Collection[GrpcApp], clock: Clock) -> NoReturn:
    """End calls of people and programs whose binding, token or login was taken from them meanwhile."""
    while True:
        await clock.sleep(RIGHTS_SECONDS)
        for app in apps:
            if ended := app.end_calls_without_right(is_of_people):
                log.info("rpc.rights_ended", calls=ended)


def _serial_of(connection: Connection) -> int | None:
    if not connection.certificates:
        return None
    try:
        return peer_identity(connection.certificates).serial
    except FleetplaneError:  # a certificate that cannot be read was not let in
        return None
