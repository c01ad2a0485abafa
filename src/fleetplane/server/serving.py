"""What a server has of itself, put together once: kernel, domains, applications and listeners.

A server on a file, or one that is active at once, builds all of it and leads from the beginning. One of
several stands by first: it serves whatever needs no active server, and takes over with everything that is
connected to it when its turn comes. Agents, watches and calls go on; domains correct what is stored and begin
what one server does for all, and what was refused until then is answered.

Every call on a shared database passes the gate first (`read_gate.py`). Nothing that a server needs for taking
over depends on what it served before: what could not be built is begun again, at the latest at its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from fleetplane import __version__
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel
from fleetplane.kernel.audit import archive as audit_archive
from fleetplane.kernel.boundary import Boundary, Failures, Work
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.revocation_lists import RevocationLists
from fleetplane.kernel.stalls import StallCollector, StallDetector, Watchdog, WatchdogCollector
from fleetplane.kernel.store import Store
from fleetplane.kernel.store.disk import Space
from fleetplane.kernel.store.history import HistoryBounds, HistoryKeeper
from fleetplane.kernel.store.metrics import NotifierCollector, StoreCollector
from fleetplane.kernel.store.servers.replica import Replica
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.telemetry.telemetry import TelemetryCollector
from fleetplane.rpc import CallStatistics
from fleetplane.rpc.listening.doors import ListenerMiddleware
from fleetplane.sections.process import ObjectStorageSettings
from fleetplane.server import assembly, housekeeping, ready_file
from fleetplane.server.audit_keeper import AuditKeeper, anchors
from fleetplane.server.front import Front
from fleetplane.server.grpc_apps import keep_to_rights
from fleetplane.server.offline import DataDirectory, MasterKeys
from fleetplane.server.read_gate import ReadGate, elsewhere
from fleetplane.settings import Settings
from fleetplane.web.metrics_page import MergedMetrics
from fleetplane.web.ops import Readiness

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.5
STALE_SECONDS = 5.0
"""Without a renewal for this long, watches end: silent no longer means that nothing happened."""
GRACE_SECONDS = 0.5
"""For answers under way then; watches go on wherever they connect."""

Announce = Callable[[dict[str, list[str]], Sequence[str]], None]
"""Prints the addresses and notices for the person who started the server."""
Turn = asyncio.Future[Store]
"""Done once this server is the active one, with the store that it then leads; or with what prevents that."""


class RunningServer:
    """See `run`, which is called again if what it built had to be given up while this server stood by."""

    def __init__(
        self,
        settings: Settings,
        keys: MasterKeys,
        blueprints: Sequence[Blueprint],
        clock: Clock,
        *,
        announce: Announce,
        turn: Turn,
        failures: Failures,
        stop: asyncio.Event,
        supervisor: str = "",
    ) -> None:
        """`supervisor` is the socket at which it is told that this server serves, or ends."""
        self._settings = settings
        self._keys = keys
        self._blueprints = blueprints
        self._attention = StallDetector(clock)
        self._watchdog = Watchdog()
        self._is_watched = False
        self._calls = CallStatistics()
        self._failures = failures
        self._announce = announce
        self._turn = turn
        self._stop = stop
        self._supervisor = supervisor
        self.is_up = False
        """Whether everything is built and serves, so that it is kept when this server's turn comes."""
        self.leads = False
        """Whether this server is, or is becoming, the active one: what fails from then on ends it."""

    def __repr__(self) -> str:
        return f"<Serving {'leads' if self.leads else 'stands by' if self.is_up else 'begins'}>"

    async def run(self, standby: Replica | None, *, leads: bool) -> None:
        """Build and serve, and take over in time; until the server is stopped, or what it knows is stale.

        Without a `standby` nobody else uses the database. A server that `leads` has had its turn.
        """
        self.leads = leads
        try:
            await self._run(standby)
        finally:
            self.is_up = False

    async def _run(self, standby: Replica | None) -> None:
        store = self._turn.result() if standby is None else standby.store.reader(lambda: elsewhere(standby))
        async with contextlib.AsyncExitStack() as stack:
            if standby is not None and not self.leads:
                await standby.index.confirm()
            if self.leads:
                self._withdraw()
            if self.leads and standby is not None:
                store.lead(self._turn.result())
            kernel = await self._kernel(store, stack)
            built = await self._built(kernel, standby)
            if self.leads:
                for domain in built.domains:
                    await domain.take_over()
            front, grace = built.front, self._settings.shutdown.grace_seconds
            await front.open(stack, grace_seconds=grace, stands_by=not self.leads)
            stack.push_async_callback(self._given_up, built)  # before the listeners are closed
            built.opened()
            self._watch_loop()
            async with Boundary() as tasks:
                running = self._here(tasks, built)
                if not self.leads:
                    assert standby is not None
                    await self._stand_by(built, standby)
                    if self._turn.done() and not self._stop.is_set():
                        await self._take_over(built, stack)
                if self.leads:
                    running += self._active(tasks, built)
                    await self._ready(built, stack)
                if self._stop.is_set():
                    await self._drain(built)
                for task in running:
                    task.cancel()

    # Building.

    async def _kernel(self, store: Store, stack: contextlib.AsyncExitStack) -> Kernel:
        """What domains stand on. While this server stands by, keys that do not exist are not made."""
        settings, clock = self._settings, store.clock  # one for all who share a database
        master = self._keys.master(may_create=False)
        telemetry = None
        if any(blueprint.keeps_telemetry for blueprint in self._blueprints):
            file, limits = Path(settings.data_dir) / "telemetry.db", assembly.telemetry_limits(settings)
            opening = Telemetry.open(file, clock, limits=limits, url=settings.store.url, sweeps=False)
            telemetry = await stack.enter_async_context(opening)
        authority = await Authority.load_or_create(store, master, clock)
        return Kernel(
            store=store,
            clock=clock,
            attention=self._attention,
            calls=self._calls,
            master=master,
            authority=authority,
            revocations=Revocations(store, clock),
            telemetry=telemetry,
            operators=await Operators.load(store, master, clock),
            revocation_lists=RevocationLists(store, authority, clock),
        )

    async def _built(self, kernel: Kernel, standby: Replica | None) -> ServerParts:
        directory = DataDirectory(self._settings, kernel.clock)
        domains = await assembly.build(
            self._settings,
            kernel,
            verify_audit=lambda lines, elsewhere: directory.verified(lines, archives_are_elsewhere=elsewhere),
        )
        with kernel.store.writing_here():
            for domain in domains:
                await domain.prepare_here()
        gate = ReadGate(standby, kernel.store, active=self.leads) if standby is not None else None
        registry = CollectorRegistry()
        front = Front(
            self._settings, kernel, self._blueprints, domains, registry, gate=gate, watchdog=self._watchdog
        )
        built = ServerParts(kernel, domains, front, gate, registry)
        built.collect()
        registry.register(WatchdogCollector(self._watchdog))
        registry.register(self._failures)
        if not self.leads:
            assert gate is not None
            front.ops.readiness = Readiness.STANDBY
            front.ops.reads = lambda: gate.is_fresh
            front.ops.elsewhere = lambda: gate.elsewhere().message
            await front.health.standing_by(reads=True)
        return built

    def _withdraw(self) -> None:
        """Take away the file of an earlier process: the database is this one's."""
        ready_file.withdraw(self._settings.ready_file)

    def _watch_loop(self) -> None:
        """From now on somebody waits when the loop is held."""
        if not self._is_watched:
            self._is_watched = True
            self._watchdog.install(asyncio.get_running_loop(), but=ListenerMiddleware.__call__.__code__)

    # Serving.

    def _here(self, tasks: Boundary, built: ServerParts) -> list[asyncio.Task[None]]:
        """What every server does."""
        kernel, front, store = built.kernel, built.front, built.kernel.store
        space = Space(Path(self._settings.data_dir) / "fleetplane.db", lambda: store.statistics().writable)
        gate = built.gate

        def trouble() -> str:
            if self.leads and gate is not None and not gate.may_lead:
                return "the leader lease has run out"
            return "the disk is full" if space.is_full else ""

        front.ops.trouble = trouble
        front.health.serves_while(lambda: not self.leads or gate is None or gate.may_lead)
        work: dict[str, Work] = {
            "attention": kernel.attention.run,
            "warden": front.warden.run,
            "secrets": store.keeping_fresh,
            "space": space.run,
            "presenting": front.presenting.run,
            "revocations": kernel.revocations.run,
            "rights": partial(keep_to_rights, front.apps.values(), kernel.clock),
        }
        begun = [tasks.keep(name, one) for name, one in work.items()]
        with store.writing_here():  # in whose context these begin
            begun += [tasks.keep(f"here/{type(one).__name__}", one.run_here) for one in built.domains]
        return begun

    async def _stand_by(self, built: ServerParts, standby: Replica) -> None:
        """Until it is this server's turn, or it is stopped, or what it knows is stale."""
        gate, front = built.gate, built.front
        assert gate is not None
        self.is_up = True
        log.info("standby.reads_served", **front.addresses)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [self._turn, stopping]
            with self._published(front, role="follower"):
                while standby.index.silent_seconds <= STALE_SECONDS:
                    await front.health.standing_by(reads=gate.is_fresh)
                    await asyncio.wait(ends, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                    if self._turn.done() or stopping.done():
                        return
        finally:
            stopping.cancel()
        self.is_up = False
        log.info("standby.reads_end", silent_seconds=round(standby.index.silent_seconds, 1))

    def _published(self, front: Front, *, role: str) -> contextlib.AbstractContextManager[None]:
        place = self._settings.ready_file
        return ready_file.published(place, front.addresses, role=role, supervisor=self._supervisor)

    # Leading.

    async def _take_over(self, built: ServerParts, stack: contextlib.AsyncExitStack) -> None:
        """Become the active server, with all that is connected to this one."""
        led = self._turn.result()
        self.leads = True
        self._withdraw()
        built.kernel.store.lead(led)
        for domain in built.domains:
            await domain.take_over()
        assert built.gate is not None
        built.gate.lead()
        grace = self._settings.shutdown.grace_seconds
        await built.front.open(stack, grace_seconds=grace, stands_by=False)
        built.opened()

    def _active(self, tasks: Boundary, built: ServerParts) -> list[asyncio.Task[None]]:
        """What one server does for all."""
        kernel, store, clock = built.kernel, built.kernel.store, built.kernel.clock
        keeper = _audit_keeper(self._settings, self._keys, store, clock)
        built.registry.register(keeper)
        work: dict[str, Work] = {
            "housekeeping": partial(housekeeping.keep_house, housekeeping.chores(store, clock), clock),
            "audit": keeper.run,
            "history": HistoryKeeper(store, clock, _history_bounds(self._settings)).run,
        }
        if kernel.telemetry is not None:
            work["telemetry"] = kernel.telemetry.sweeping
        begun = [tasks.keep(name, one) for name, one in work.items()]
        begun += [tasks.keep(f"active/{type(one).__name__}", one.run_active) for one in built.domains]
        begun.append(tasks.essential("store", self._turn.result().writing()))
        return begun

    async def _ready(self, built: ServerParts, stack: contextlib.AsyncExitStack) -> None:
        """Say that this server takes every call, until it is stopped."""
        front, addresses = built.front, built.front.addresses
        await front.health.serving()
        front.ops.readiness = Readiness.READY
        front.ops.reads, front.ops.elsewhere = bool, str
        stack.enter_context(self._published(front, role="leader"))
        log.info("server.ready", version=__version__, pid=os.getpid(), **addresses)
        self._announce(addresses, [line for domain in built.domains for line in domain.notices])
        self.is_up = True
        await self._stop.wait()

    # Ending.

    async def _drain(self, built: ServerParts) -> None:
        grace = self._settings.shutdown.grace_seconds
        log.info("server.stopping", grace_seconds=grace)
        ready_file.tell_supervisor(self._supervisor, "STOPPING=1")
        built.front.ops.reads = bool
        built.front.ops.readiness = Readiness.DRAINING
        await built.front.health.draining()
        built.front.stop_accepting()
        await built.drain(grace)

    async def _given_up(self, built: ServerParts) -> None:
        """End watches, each with where to go on, and streams of agents, of a server that stands by."""
        built.front.ops.readiness = Readiness.DRAINING
        if not self.leads:
            await built.drain(GRACE_SECONDS)


class ServerParts:
    """The parts of one server."""

    def __init__(
        self,
        kernel: Kernel,
        domains: Sequence[Domain],
        front: Front,
        gate: ReadGate | None,
        registry: CollectorRegistry,
    ) -> None:
        self.kernel = kernel
        self.domains = domains
        self.front = front
        self.gate = gate
        self.registry = registry
        self._is_drained = False

    def __repr__(self) -> str:
        return f"<Built {self.front!r}>"

    def collect(self) -> None:
        registry, kernel = self.registry, self.kernel
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        registry.register(kernel.calls.collector())
        registry.register(StoreCollector(kernel.store))
        registry.register(NotifierCollector(kernel.store))
        registry.register(StallCollector(kernel.attention))
        if kernel.telemetry is not None:
            registry.register(TelemetryCollector(kernel.telemetry))
        registry.register(
            MergedMetrics(collector for domain in self.domains for collector in domain.collectors)
        )

    def opened(self) -> None:
        """Listeners are open, or more of them."""
        for domain in self.domains:
            domain.opened(self.front.addresses)

    async def drain(self, grace_seconds: float) -> None:
        """End streams, each in the way that its protocol calls clean; once."""
        if self._is_drained:
            return
        self._is_drained = True
        for domain in self.domains:
            domain.drain()
        await self.front.drain(grace_seconds)


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
