"""What a server answers while it stands by: reads and watches, over REST and gRPC.

Every read passes the gate first (`read_gate.py`): what was acknowledged anywhere before the request came is
in the answer. Everything else is refused, naming the server that is active. Of the gRPC listeners those are
open on which something can be read; listeners of agents are not, and balancers see that.
Nothing that the server needs for taking over depends on this: what fails here is begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from fleetplane import __version__, assembly, endpoints
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel, ReadableOnStandby
from fleetplane.domains.fleetwide.server import FleetwideDomain
from fleetplane.grpc_apps import LOCAL_PRINCIPAL, compose, cut_off, keep_to_rights
from fleetplane.kernel.attention import Attention
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError, Unavailable
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.authority import FLEET, WORKLOAD
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.store import Store
from fleetplane.kernel.store.bells.metrics import BellCollector
from fleetplane.kernel.store.metrics import StoreCollector
from fleetplane.kernel.store.servers.read_index import FRESH_SECONDS
from fleetplane.kernel.store.servers.standby import Standby
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.keys import MasterKeys
from fleetplane.read_gate import ReadGate, elsewhere
from fleetplane.rpc import CallStatistics, GrpcApp, Listener, ListenerSpec, open_listener
from fleetplane.rpc.introspection import HealthBoard
from fleetplane.settings import Settings
from fleetplane.web.metrics_page import MetricsPage
from fleetplane.web.ops import OpsApp, Readiness
from fleetplane.web.owner_socket import SESSION_SECONDS, OwnerSocket

log = structlog.get_logger(__name__)

BEGIN_SECONDS = 1.0
"""Before reads are served: who is alone, or first, is active by then."""
RETRY_SECONDS = 5.0
LOOK_SECONDS = 0.5
STALE_SECONDS = 5.0
"""Without a renewal for this long, watches end: silent no longer means that nothing happened."""
GRACE_SECONDS = 0.5
"""For answers under way when this server becomes active; watches end, and go on wherever they connect."""
KEYS = frozenset({FLEET.secret, WORKLOAD.secret})
SIGNING = "signing/"


class StandbyReads:
    """See `serve`."""

    def __init__(
        self, settings: Settings, keys: MasterKeys, blueprints: Sequence[Blueprint], clock: Clock
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._blueprints = blueprints
        self._keeps_telemetry = any(one.keeps_telemetry for one in blueprints)
        self._clock = clock
        self._standby: Standby | None = None

    def gate(self, store: Store) -> ReadGate | None:
        """The gate of a server that is active; None where no other server uses the same database."""
        return None if self._standby is None else ReadGate(self._standby, store, writes=True)

    def serve(self, standby: Standby) -> Coroutine[Any, Any, None]:
        """Answer reads until cancelled."""
        self._standby = standby  # known to the gate also if this server is active at once
        return self._answer(standby)

    async def _answer(self, standby: Standby) -> None:
        await self._clock.sleep(BEGIN_SECONDS)
        while True:
            try:
                await self._serve(standby)
            except* Exception as errors:  # whatever it is, this server must still take over
                error = errors.exceptions[0]
                log.warning("standby.reads_not_served", error=getattr(error, "message", repr(error)))
            await self._clock.sleep(RETRY_SECONDS)

    async def _serve(self, standby: Standby) -> None:
        """Answer until memory is stale or a key has changed that was read at the beginning."""
        settings, clock = self._settings, self._clock
        await standby.index.confirm()
        async with contextlib.AsyncExitStack() as stack:
            keys = _Keys()
            kernel = await self._kernel(standby, stack, keys)
            domains = await assembly.build(settings, kernel, stands_by=True)
            for domain in domains:
                if isinstance(domain, ReadableOnStandby):
                    await domain.prepare_reading()
            gate = ReadGate(standby, kernel.store, writes=False)
            ops = self._ops(kernel, gate)
            fleetwide = _fleetwide(domains)
            anywhere = fleetwide.apis.is_written_anywhere
            ops.mount(gate.mount(one, anywhere) for domain in domains for one in domain.routes)
            health = HealthBoard()
            apps = compose(self._blueprints, domains, kernel.calls, clock, health, gate)
            kernel.revocations.subscribe(lambda revoked: cut_off(apps.values(), revoked))
            await health.standing_by(reads=True)
            listeners = await self._open(stack, self._specs(kernel, domains, ops, apps))
            stack.push_async_callback(_drained, domains, apps.values())
            log.info("standby.reads_served", **{one.name: one.addresses for one in listeners})
            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(fleetwide.follow(), name="standby-changes"),
                    tasks.create_task(kernel.revocations.run(), name="standby-revocations"),
                    tasks.create_task(keep_to_rights(apps.values(), clock), name="standby-rights"),
                ]
                while standby.index.silent_seconds <= STALE_SECONDS and not keys.changed:
                    # Watches look by themselves whether their caller may still read, in memory.
                    with contextlib.suppress(TimeoutError):  # and are ended in time, whatever hangs
                        async with asyncio.timeout(FRESH_SECONDS):
                            await kernel.store.refreshed()
                    await health.standing_by(reads=gate.is_fresh)
                    await clock.sleep(LOOK_SECONDS)
                for task in following:
                    task.cancel()
        log.info("standby.reads_end", silent_seconds=round(standby.index.silent_seconds, 1))

    def _ops(self, kernel: Kernel, gate: ReadGate) -> OpsApp:
        registry = CollectorRegistry()
        registry.register(StoreCollector(kernel.store))
        registry.register(BellCollector(kernel.store))
        registry.register(kernel.calls.collector())
        page = MetricsPage(
            registry,
            token=self._settings.metrics.token,
            needs_token=endpoints.is_web_remote(self._settings),
            clock=self._clock,
        )
        ops = OpsApp(registry, version=__version__, metrics=page)
        ops.readiness = Readiness.STANDBY
        ops.reads = lambda: gate.is_fresh
        ops.elsewhere = lambda: gate.elsewhere().message
        return ops

    def _specs(
        self, kernel: Kernel, domains: Sequence[Domain], ops: OpsApp, apps: dict[str, GrpcApp]
    ) -> list[ListenerSpec]:
        """The web listener, and every other on which something can be read."""
        roles = {role for blueprint in self._blueprints for role in blueprint.operator_roles}
        owner = OwnerSocket(
            apps[endpoints.ADMIN],
            ops,
            lambda: kernel.operators.session(LOCAL_PRINCIPAL.name, roles=roles, life_seconds=SESSION_SECONDS),
        )
        opened = {name: app for name, app in apps.items() if app.has_reads}
        grpc = endpoints.grpc(self._settings, opened, domains, kernel.authority, owner=owner)
        web = endpoints.web(self._settings, ops, kernel.authority)
        return [endpoints.within_budget(self._settings, spec) for spec in (web, *grpc)]

    async def _open(self, stack: contextlib.AsyncExitStack, specs: Sequence[ListenerSpec]) -> list[Listener]:
        """Open the web listener, and what else can be opened: another server may have that address."""
        listeners = []
        for spec in specs:
            try:
                opening = open_listener(spec, grace_seconds=GRACE_SECONDS)
                listeners.append(await stack.enter_async_context(opening))
            except SettingsError as error:
                if spec.name == "web":
                    raise
                log.warning("standby.listener_not_opened", listener=spec.name, error=error.message)
        return listeners

    async def _kernel(self, standby: Standby, stack: contextlib.AsyncExitStack, keys: _Keys) -> Kernel:
        """What domains stand on, over a store that refuses writes: keys that do not exist are not made."""
        store = standby.store.reader(lambda: elsewhere(standby))
        clock = store.clock
        store.keep_fresh(keys)  # before the first is read
        master = self._keys.master(may_create=False)
        telemetry = None
        if self._keeps_telemetry:
            file = Path(self._settings.data_dir) / "telemetry.db"
            url = self._settings.store.url
            telemetry = await stack.enter_async_context(Telemetry.open(file, clock, url=url, only_reads=True))
        return Kernel(
            store=store,
            clock=clock,
            attention=Attention(clock),
            calls=CallStatistics(),
            master=master,
            authority=await Authority.load_or_create(store, master, clock),
            revocations=Revocations(store, clock),
            telemetry=telemetry,
            operators=await Operators.load(store, master, clock),
        )


async def _drained(domains: Iterable[Domain], apps: Iterable[GrpcApp]) -> None:
    """End watches, each with where to go on, and then what is left."""
    for domain in domains:
        domain.drain()
    async with asyncio.TaskGroup() as draining:
        for app in apps:
            draining.create_task(app.drain(GRACE_SECONDS))


def _fleetwide(domains: Sequence[Domain]) -> FleetwideDomain:
    return next(one for one in domains if isinstance(one, FleetwideDomain))


class _Keys:
    """Notices that a key has changed which was read at the beginning."""

    def __init__(self) -> None:
        self.changed = False

    def secret_changed(self, name: str) -> None:
        self.changed = self.changed or name in KEYS or name.startswith(SIGNING)

    async def refresh(self) -> None:
        if self.changed:
            raise Unavailable("keys have changed, and are being read", hint="try again")
