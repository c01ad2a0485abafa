"""The server's composition root: the whole server, in the order it comes to life."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from fleetplane import __version__, assembly, endpoints, housekeeping, ready_file
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel
from fleetplane.kernel.access import AccessTable, Grant, Principal, Role
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations, Revoked
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.metrics import StoreCollector
from fleetplane.kernel.telemetry import Telemetry, TelemetryLimits
from fleetplane.kernel.telemetry.metrics import TelemetryCollector
from fleetplane.kernel.telemetry.values import DAY_SECONDS
from fleetplane.presenting import Presenting
from fleetplane.rpc import (
    Authentication,
    Authenticator,
    CallStatistics,
    FixedPrincipal,
    GrpcApp,
    Listener,
    ListenerSpec,
    MethodTable,
    open_listener,
)
from fleetplane.rpc.descriptors import connections_of
from fleetplane.rpc.introspection import HealthBoard, add_reflection, introspection_methods
from fleetplane.settings import Settings
from fleetplane.web.merged_metrics import Merged
from fleetplane.web.ops import OpsApp, Readiness

log = structlog.get_logger(__name__)

LOCAL_PRINCIPAL = Principal(name="local", roles=frozenset({Role("local")}))
"""Whoever reached a socket that only this machine can reach."""
INSISTING_SECONDS = 0.5
"""Signals this close together are one request: `timeout`, a terminal and a supervisor may each pass it on."""
ANONYMOUS_PRINCIPAL = Principal(name="anonymous", roles=frozenset())


Announce = Callable[[dict[str, list[str]], Sequence[str]], None]
"""Tells the person who started the server where to go, and what else they should know."""


async def serve(settings: Settings, *, announce: Announce) -> None:
    """Run until SIGTERM or SIGINT, then end what is open cleanly."""
    clock = SystemClock()
    stop = _stop_on_signals()
    data_dir = Path(settings.data_dir)
    blueprints = assembly.blueprints(settings)
    kinds = [*KERNEL_KINDS, *(kind for blueprint in blueprints for kind in blueprint.kinds)]
    calls = CallStatistics()
    registry = CollectorRegistry()
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            Store.open(_store_settings(settings, data_dir), kinds=kinds, clock=clock)
        )
        ready_file.withdraw(settings.ready_file)
        master = _master_key(settings, data_dir, clock)
        authority = await Authority.load_or_create(store, master, clock)
        revocations = Revocations(store, clock)
        telemetry = None
        if any(blueprint.keeps_telemetry for blueprint in blueprints):
            telemetry = await stack.enter_async_context(
                Telemetry.open(data_dir / "telemetry.db", clock, limits=_telemetry_limits(settings))
            )
            registry.register(TelemetryCollector(telemetry))
        kernel = Kernel(
            store=store, clock=clock, calls=calls, master=master, authority=authority,
            revocations=revocations, telemetry=telemetry,
            operators=await Operators.load(store, master, clock),
        )  # fmt: skip
        domains = await assembly.build(settings, kernel)
        for domain in domains:
            await domain.prepare()
        ops = OpsApp(registry, version=__version__)
        ops.mount(mount for domain in domains for mount in domain.routes)
        health = HealthBoard()
        apps = compose(blueprints, domains, calls, clock, health)
        revocations.subscribe(lambda revoked: cut_off(apps.values(), revoked))
        _collect(registry, domains, calls, store)

        def wanted() -> list[ListenerSpec]:
            """How every listener is opened, with certificates made now."""
            grpc = endpoints.grpc(settings, apps, domains, authority)
            return [endpoints.web(settings, ops, authority), *grpc]

        specs = wanted()
        connections = connections_of([spec.connections for spec in specs])
        listeners = [
            await stack.enter_async_context(
                open_listener(
                    replace(spec, connections=number), grace_seconds=settings.shutdown.grace_seconds
                )
            )
            for spec, number in zip(specs, connections, strict=True)
        ]
        presenting = Presenting(authority, listeners, wanted, apps.values(), clock)
        addresses = {listener.name: listener.addresses for listener in listeners}
        for domain in domains:
            domain.opened(addresses)
        async with asyncio.TaskGroup() as controllers:
            tasks = [controllers.create_task(domain.run(), name=f"domain/{domain!r}") for domain in domains]
            chores = housekeeping.chores(store, clock)
            tasks.append(controllers.create_task(housekeeping.keep_house(chores, clock), name="housekeeping"))
            tasks.append(controllers.create_task(store.writing(), name="store"))
            tasks.append(controllers.create_task(presenting.run(), name="presenting"))
            await health.serving()
            ops.readiness = Readiness.READY
            stack.enter_context(ready_file.published(settings.ready_file, addresses))
            log.info("server.ready", version=__version__, pid=os.getpid(), **addresses)
            announce(addresses, [line for domain in domains for line in domain.notices])
            await stop.wait()
            log.info("server.stopping", grace_seconds=settings.shutdown.grace_seconds)
            ops.readiness = Readiness.DRAINING
            await health.draining()
            await _drain(domains, apps, listeners, settings.shutdown.grace_seconds)
            for task in tasks:
                task.cancel()
    log.info("server.stopped")


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    asked_at = math.inf

    def handle(number: signal.Signals) -> None:
        nonlocal asked_at
        if loop.time() - asked_at >= INSISTING_SECONDS:  # asked again: whoever asks means it
            log.warning("server.killed", signal=number.name)
            os._exit(130)
        asked_at = min(asked_at, loop.time())
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop


def _store_settings(settings: Settings, data_dir: Path) -> StoreSettings:
    return StoreSettings(
        path=data_dir / "fleetplane.db",
        ring_events=settings.store.ring_events,
        history_revisions=settings.store.history_revisions,
        group_limit=settings.store.group_limit,
    )


def _telemetry_limits(settings: Settings) -> TelemetryLimits:
    wanted = settings.telemetry
    return TelemetryLimits(
        points_age_seconds=wanted.points_days * DAY_SECONDS,
        lines_age_seconds=wanted.lines_days * DAY_SECONDS,
        size_bytes=wanted.size_mebibytes * 1024**2,
    )


def _master_key(settings: Settings, data_dir: Path, clock: Clock) -> MasterKey:
    if settings.identity.master_key:
        return MasterKey.from_text(settings.identity.master_key, clock)
    return MasterKey.from_file(Path(settings.identity.master_key_file or data_dir / "master.key"), clock)


def compose(
    blueprints: Sequence[Blueprint],
    domains: Sequence[Domain],
    calls: CallStatistics,
    clock: Clock,
    health: HealthBoard,
) -> dict[str, GrpcApp]:
    """One application per gRPC listener; refuses a method without a row in the table."""
    services = [service for domain in domains for service in domain.services]
    names = sorted({service.listener for service in services})
    table = MethodTable(
        [
            *(row for blueprint in blueprints for row in blueprint.methods),
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
            listener=name, table=table, access=AccessTable(grants),
            authenticators=authenticators,
            clock=clock, statistics=calls,
        )  # fmt: skip
        for service in services:
            if service.listener == name:
                app.add_service(service.descriptor, service.servicer, raw_requests=service.raw_requests)
        health.add_to(app)
        add_reflection(app)
        app.seal()
        apps[name] = app
    return apps


def _collect(
    registry: CollectorRegistry, domains: Iterable[Domain], calls: CallStatistics, store: Store
) -> None:
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(calls.collector())
    registry.register(StoreCollector(store))
    registry.register(Merged(collector for domain in domains for collector in domain.collectors))


def cut_off(apps: Iterable[GrpcApp], revoked: Revoked) -> None:
    """End every call that a revoked principal has running, on whatever listener."""
    if revoked.principal is not None:
        for app in apps:
            app.end_calls_of(revoked.principal)


async def _drain(
    domains: Iterable[Domain], apps: dict[str, GrpcApp], listeners: Iterable[Listener], grace_seconds: float
) -> None:
    for listener in listeners:
        listener.stop_accepting()
    for domain in domains:
        domain.drain()
    async with asyncio.TaskGroup() as draining:
        for app in apps.values():
            draining.create_task(app.drain(grace_seconds))
