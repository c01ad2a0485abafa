"""The server's composition root: the whole server, in the order it comes to life."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from fleetplane import __version__, assembly, housekeeping, ready_file
from fleetplane.audit_keeper import AuditKeeper, anchors
from fleetplane.domains.blueprint import Domain, Kernel, prepare_both, run_both
from fleetplane.front import Front
from fleetplane.grpc_apps import keep_to_rights
from fleetplane.kernel.attention import Attention, AttentionCollector
from fleetplane.kernel.audit import archive as audit_archive
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.errors import IntegrityError, SettingsError
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.revocation_lists import RevocationLists
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.private_directory import ensure_private
from fleetplane.kernel.store import Store, StoreSettings, lineage
from fleetplane.kernel.store.bells.metrics import BellCollector
from fleetplane.kernel.store.history import HistoryBounds, HistoryKeeper
from fleetplane.kernel.store.metrics import StoreCollector
from fleetplane.kernel.store.space import Space
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.telemetry.metrics import TelemetryCollector
from fleetplane.kernel.watchdog import Watchdog, WatchdogCollector
from fleetplane.keys import MasterKeys
from fleetplane.offline import DataDirectory
from fleetplane.rpc import (
    CallStatistics,
)
from fleetplane.rpc.listening.doors import Door
from fleetplane.sections.objects import ObjectStorageSettings
from fleetplane.settings import Settings
from fleetplane.standby_reads import StandbyReads
from fleetplane.web.merged_metrics import Merged
from fleetplane.web.ops import Readiness

T = TypeVar("T")
log = structlog.get_logger(__name__)

INSISTING_SECONDS = 0.5
"""Signals this close together are one request: `timeout`, a terminal and a supervisor may each pass it on."""


Announce = Callable[[dict[str, list[str]], Sequence[str]], None]
"""Prints the addresses and notices for the person who started the server."""


async def serve(settings: Settings, *, announce: Announce) -> None:
    """Run until SIGTERM or SIGINT, then end what is open cleanly."""
    clock: Clock = SystemClock()
    attention = Attention(clock)
    watchdog = Watchdog()
    stop = _stop_on_signals()
    data_dir = Path(settings.data_dir)
    ensure_private(data_dir, setting="data_dir")
    blueprints = assembly.blueprints(settings)
    assembly.shared_objects(settings)  # or an error, before anything is opened
    kinds = [*KERNEL_KINDS, *(kind for blueprint in blueprints for kind in blueprint.kinds)]
    calls = CallStatistics()
    registry = CollectorRegistry()
    async with contextlib.AsyncExitStack() as stack:
        keys = MasterKeys(settings, clock)
        reads = StandbyReads(settings, keys, blueprints, clock, watchdog)
        opening = Store.open(
            _store_settings(settings, data_dir, clock),
            kinds=kinds,
            clock=clock,
            audit_key=lambda is_new: keys.audit(may_create=is_new),
            meanwhile=reads.serve,
        )
        try:
            store = await _until(stop, stack.enter_async_context(opening))
            if store is None:  # while it stood by
                return
        except (IntegrityError, SettingsError):  # of ours: nobody else has it open
            ready_file.withdraw(settings.ready_file)
            raise
        ready_file.withdraw(settings.ready_file)
        clock = store.clock  # one for all who share a database
        master = keys.master(may_create=False)
        authority = await Authority.load_or_create(store, master, clock)
        revocations = Revocations(store, clock)
        telemetry = None
        if any(blueprint.keeps_telemetry for blueprint in blueprints):
            telemetry = await stack.enter_async_context(
                Telemetry.open(
                    data_dir / "telemetry.db",
                    clock,
                    limits=assembly.telemetry_limits(settings),
                    url=settings.store.url,
                )
            )
            registry.register(TelemetryCollector(telemetry))
        kernel = Kernel(
            store=store,
            clock=clock,
            attention=attention,
            calls=calls,
            master=master,
            authority=authority,
            revocations=revocations,
            telemetry=telemetry,
            operators=await Operators.load(store, master, clock),
            revocation_lists=RevocationLists(store, authority, clock),
        )
        directory = DataDirectory(settings, clock)
        domains = await assembly.build(
            settings,
            kernel,
            verify_audit=lambda lines, elsewhere: directory.verified(lines, archives_are_elsewhere=elsewhere),
        )
        for domain in domains:
            await prepare_both(domain)
        front = Front(
            settings, kernel, blueprints, domains, registry, gate=reads.gate(store), watchdog=watchdog
        )
        ops, health, apps = front.ops, front.health, front.apps
        keeper = _audit_keeper(settings, keys, store, clock)
        registry.register(keeper)
        _collect(registry, domains, calls, store)
        registry.register(AttentionCollector(attention))
        registry.register(WatchdogCollector(watchdog))
        await front.open(stack, grace_seconds=settings.shutdown.grace_seconds)
        addresses = front.addresses
        for domain in domains:
            domain.opened(addresses)
        # From here on somebody waits when the loop is held.
        watchdog.install(asyncio.get_running_loop(), but=Door.__call__.__code__)
        async with asyncio.TaskGroup() as controllers:
            tasks = [
                controllers.create_task(run_both(domain), name=f"domain/{domain!r}") for domain in domains
            ]
            tasks.append(controllers.create_task(attention.run(), name="attention"))
            tasks.append(controllers.create_task(front.warden.run(), name="warden"))
            chores = housekeeping.chores(store, clock)
            tasks.append(controllers.create_task(housekeeping.keep_house(chores, clock), name="housekeeping"))
            tasks.append(controllers.create_task(store.writing(), name="store"))
            tasks.append(controllers.create_task(store.keeping_fresh(), name="secrets"))
            tasks.append(controllers.create_task(keeper.run(), name="audit"))
            history = HistoryKeeper(store, clock, _history_bounds(settings))
            tasks.append(controllers.create_task(history.run(), name="history"))
            space = Space(data_dir / "fleetplane.db", lambda: store.statistics().writable)
            ops.trouble = lambda: "the disk is full" if space.is_full else ""
            tasks.append(controllers.create_task(space.run(), name="space"))
            tasks.append(controllers.create_task(front.presenting.run(), name="presenting"))
            tasks.append(controllers.create_task(revocations.run(), name="revocations"))
            tasks.append(controllers.create_task(keep_to_rights(apps.values(), clock), name="rights"))
            await health.serving()
            ops.readiness = Readiness.READY
            stack.enter_context(ready_file.published(settings.ready_file, addresses))
            log.info("server.ready", version=__version__, pid=os.getpid(), **addresses)
            announce(addresses, [line for domain in domains for line in domain.notices])
            await stop.wait()
            log.info("server.stopping", grace_seconds=settings.shutdown.grace_seconds)
            ops.readiness = Readiness.DRAINING
            await health.draining()
            await _drain(domains, front, settings.shutdown.grace_seconds)
            for task in tasks:
                task.cancel()
    log.info("server.stopped")


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Do something that may take as long as it likes, unless the server is asked to stop."""
    doing, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([doing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        return None
    finally:
        for task in (doing, stopping):
            task.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)


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


def _store_settings(settings: Settings, data_dir: Path, clock: Clock) -> StoreSettings:
    return StoreSettings(
        first_revision=lineage.first_revision(clock.now_ns()),
        # A key that was given is no sign of an earlier start; one that a server made is.
        evidence=() if settings.identity.master_key else (data_dir / "master.key",),
        path=data_dir / "fleetplane.db",
        url=settings.store.url,
        server=settings.server_name,
        bus=settings.bus.nats,
        ring_events=settings.store.ring_events,
        history_revisions=settings.store.history_revisions,
        group_limit=settings.store.group_limit,
        level_delay_seconds=settings.store.level_delay_seconds,
    )


def _history_bounds(settings: Settings) -> HistoryBounds:
    return HistoryBounds(
        size_bytes=settings.store.history_mebibytes * 1024**2, age_days=settings.store.history_days
    )


def _audit_keeper(settings: Settings, keys: MasterKeys, store: Store, clock: Clock) -> AuditKeeper:
    directory = settings.state_directory / audit_archive.DIRECTORY
    wants_objects = any(place.startswith("objects:") for place in settings.audit.anchors)
    objects = settings.of(ObjectStorageSettings).open(settings.state_directory) if wants_objects else None
    return AuditKeeper(
        store,
        keys.checkpoints(),
        clock,
        settings.audit,
        directory=directory,
        anchors=anchors(settings.audit, directory, objects),
    )


def _collect(
    registry: CollectorRegistry, domains: Iterable[Domain], calls: CallStatistics, store: Store
) -> None:
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(calls.collector())
    registry.register(StoreCollector(store))
    registry.register(BellCollector(store))
    registry.register(Merged(collector for domain in domains for collector in domain.collectors))


async def _drain(domains: Iterable[Domain], front: Front, grace_seconds: float) -> None:
    front.stop_accepting()
    for domain in domains:
        domain.drain()
    await front.drain(grace_seconds)
