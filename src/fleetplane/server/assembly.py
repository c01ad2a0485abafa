"""The domains that are to run, built from the settings.

A domain is imported only if it is enabled: what a server does not run costs it neither memory
nor start-up time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fleetplane import __version__, environment
from fleetplane.domains import discovery
from fleetplane.domains.blueprint import Blueprint, Build, Domain, Kernel, ServerContext
from fleetplane.domains.declaration import Declaration, load
from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.objects import Objects
from fleetplane.kernel.telemetry import TelemetryLimits
from fleetplane.kernel.telemetry.values import DAY_SECONDS
from fleetplane.sections.process import ObjectStorageSettings
from fleetplane.settings import Settings, domain_names

if TYPE_CHECKING:
    from fleetplane.fleet.audit import Verification
    from fleetplane.fleet.servers import ServerNeighbours


def enabled(settings: Settings) -> list[Declaration]:
    """What the settings want to run."""
    found = discovery.installed()
    return [found.named(name) for name in settings.domains]


def blueprints(settings: Settings) -> list[Blueprint]:
    """The blueprints of the enabled domains, and of those that every server has."""
    from fleetplane.domains.fleetwide import BLUEPRINT as FLEETWIDE
    from fleetplane.domains.operators import BLUEPRINT as OPERATORS

    return [*map(_blueprint, enabled(settings)), FLEETWIDE, OPERATORS]


async def build(
    settings: Settings,
    kernel: Kernel,
    *,
    verify_audit: Verification | None = None,
) -> list[Domain]:
    """Every enabled domain, ready to be prepared; and those that every server has.

    `verify_audit` is how the server checks its own audit log when somebody asks it to.
    """
    from fleetplane.domains.fleetwide import FleetwideDomain, release_options
    from fleetplane.domains.operators import OperatorsDomain
    from fleetplane.fleet.people.rights import Rights

    wanted = enabled(settings)
    context = _context(settings, wanted)
    # Together: at a first start each makes keys, in threads, and none needs what another makes.
    async with asyncio.TaskGroup() as building:
        tasks = [building.create_task(_build(one, settings, context, kernel)) for one in wanted]
    domains = [task.result() for task in tasks]
    fleetwide = FleetwideDomain(
        kernel,
        zip(map(_blueprint, wanted), domains, strict=True),
        version=__version__,
        releases=await release_options(
            kernel,
            settings.state_directory,
            shared=shared_objects(settings),
            check_in_seconds=settings.releases.check_in_seconds,
            hello_seconds=settings.releases.hello_seconds,
        ),
        gates=settings.rollouts,
        verify_audit=verify_audit,
        beside=_neighbours(settings, kernel),
    )
    declared = blueprints(settings)
    held = Rights(kernel.door.tree, [one.grants for one in declared], _operator_roles(declared))
    catalogue = fleetwide.apis.catalogue
    operators = OperatorsDomain(
        kernel, held=held, catalogue=catalogue, version=__version__, openid=settings.oidc
    )
    return [*domains, fleetwide, operators]


async def _build(
    declaration: Declaration, settings: Settings, context: ServerContext, kernel: Kernel
) -> Domain:
    build: Build = load(declaration.build)
    return await build(settings.section(declaration.name), context, kernel)


def shared_objects(settings: Settings) -> Objects | None:
    """Storage for what other servers of the same store need as well; None where there is none.

    Raises if something that runs here needs it: after a takeover the next server would have nothing of it.
    """
    if not settings.store.url:
        return None
    tables = {name: settings.section(name) for name in domain_names()}
    for name, table in tables.items():
        if not isinstance(table, ObjectStorageSettings):
            continue
        if table.is_shared:
            return table.open(settings.state_directory)
        users = [f"the domain {name}"] if name in settings.domains else []
        if any(one.startswith("objects:") for one in settings.audit.anchors):
            users.append("audit.anchors")
        if users:
            raise SettingsError(
                f"{name}.storage: objects of {' and '.join(users)} would lie in the data directory of this"
                " server alone, and store.url is shared with others",
                field=f"{name}.storage",
                hint=f'set {name}.storage = "s3", or {name}.directory to a folder that all servers share',
            )
    return None


def telemetry_limits(settings: Settings) -> TelemetryLimits:
    wanted = settings.telemetry
    return TelemetryLimits(
        points_age_seconds=wanted.points_days * DAY_SECONDS,
        lines_age_seconds=wanted.lines_days * DAY_SECONDS,
        size_bytes=wanted.size_mebibytes * 1024**2,
        series=wanted.series,
        tenant_series=wanted.tenant_series,
        source_series=wanted.source_series,
    )


def _neighbours(settings: Settings, kernel: Kernel) -> ServerNeighbours:
    from fleetplane.fleet.servers import ServerNeighbours

    if not settings.store.url:
        return ServerNeighbours(name=socket.gethostname(), file=settings.state_directory / "fleetplane.db")
    from fleetplane.kernel.store.engines.postgres_servers import ServerRoster

    roster = ServerRoster(settings.store.url, kernel.clock, settings.server_name)
    store = kernel.store
    return ServerNeighbours(name=settings.server_name, roster=roster, leads=lambda: store.leads)


def _context(settings: Settings, wanted: Iterable[Declaration]) -> ServerContext:
    names = {socket.gethostname()}
    for declaration in wanted:
        names.update(settings.section(declaration.name).own_names())
    return ServerContext(
        version=__version__,
        state_directory=settings.state_directory,
        environment=environment.inherited(),
        own_names=frozenset(names),
        listeners={
            listener.name: settings.listener(listener.name)
            for declaration in wanted
            for listener in declaration.listeners
        },
    )


def _blueprint(declaration: Declaration) -> Blueprint:
    found = load(declaration.server)
    assert isinstance(found, Blueprint)
    return found


def _operator_roles(found: Iterable[Blueprint]) -> set[Role]:
    return {role for blueprint in found for role in blueprint.operator_roles}
