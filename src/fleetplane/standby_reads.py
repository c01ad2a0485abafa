"""What a server answers while it stands by: reads and watches of the resource API, on the web listener.

Every read asks the read index first (`kernel/store/servers/read_index.py`): what was acknowledged anywhere
before the request came is in the answer. Everything else is refused, naming the server that is active.
Nothing that the server needs for taking over depends on this: what fails here is begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from fleetplane import __version__, assembly, endpoints
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel, ReadableOnStandby
from fleetplane.domains.fleetwide.server import FleetwideDomain
from fleetplane.kernel.attention import Attention
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unavailable
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
from fleetplane.rpc import CallStatistics, open_listener
from fleetplane.settings import Settings
from fleetplane.web.apis import problems
from fleetplane.web.metrics_page import MetricsPage
from fleetplane.web.ops import App, Mount, OpsApp, Readiness, Receive, Scope, Send

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
READING = frozenset({"GET", "HEAD", "OPTIONS"})


class StandsBy(Unavailable):
    """The call is for the active server."""

    reason = "STANDS_BY"


class StandbyReads:
    """See `serve`."""

    def __init__(
        self, settings: Settings, keys: MasterKeys, blueprints: Sequence[Blueprint], clock: Clock
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._keeps_telemetry = any(one.keeps_telemetry for one in blueprints)
        self._clock = clock

    async def serve(self, standby: Standby) -> None:
        """Answer reads until cancelled."""
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
            gate = _Gate(standby, kernel.store)
            registry = CollectorRegistry()
            registry.register(StoreCollector(kernel.store))
            registry.register(BellCollector(kernel.store))
            page = MetricsPage(
                registry,
                token=settings.metrics.token,
                needs_token=endpoints.is_web_remote(settings),
                clock=clock,
            )
            ops = OpsApp(registry, version=__version__, metrics=page)
            ops.readiness = Readiness.STANDBY
            ops.reads = lambda: standby.index.silent_seconds <= FRESH_SECONDS
            ops.elsewhere = lambda: gate.elsewhere().message
            fleetwide = _fleetwide(domains)
            ops.mount(gate.mount(one) for one in fleetwide.apis.routes)
            spec = endpoints.within_budget(settings, endpoints.web(settings, ops, kernel.authority))
            listener = await stack.enter_async_context(open_listener(spec, grace_seconds=GRACE_SECONDS))
            stack.callback(fleetwide.apis.watching.end)
            log.info("standby.reads_served", web=listener.addresses)
            async with asyncio.TaskGroup() as tasks:
                following = tasks.create_task(fleetwide.follow(), name="standby-changes")
                while standby.index.silent_seconds <= STALE_SECONDS and not keys.changed:
                    # Watches look by themselves whether their caller may still read, in memory.
                    await kernel.store.refreshed()
                    await clock.sleep(LOOK_SECONDS)
                following.cancel()
        log.info("standby.reads_end", silent_seconds=round(standby.index.silent_seconds, 1))

    async def _kernel(self, standby: Standby, stack: contextlib.AsyncExitStack, keys: _Keys) -> Kernel:
        """What domains stand on, over a store that refuses writes: keys that do not exist are not made."""
        store, clock = standby.store.reader(), self._clock
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


class _Gate:
    """Before every route: reads wait until memory is up to date, everything else is refused."""

    def __init__(self, standby: Standby, store: Store) -> None:
        self._standby = standby
        self._store = store

    def elsewhere(self) -> StandsBy:
        active = self._standby.seat.holder.server
        return StandsBy(
            f"this server stands by and answers reads only; {active} is active",
            hint=f"call {active}, or the balancer's address",
        )

    def mount(self, one: Mount) -> Mount:
        return Mount(path=one.path, app=self._guarded(one.app), summary=one.summary)

    def _guarded(self, app: App) -> App:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                if scope["type"] != "http" or scope["method"] not in READING:
                    raise self.elsewhere()
                await self._standby.index.confirm()
                await self._store.refreshed()
            except FleetplaneError as error:
                await _refuse(error, scope, send)
                return
            await app(scope, receive, send)

        return guarded


async def _refuse(error: FleetplaneError, scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1013, "reason": error.message[:100]})
        return
    refusal = problems.problem(error, "")
    headers = [(name.encode(), value.encode()) for name, value in refusal.headers.items()]
    headers.append((b"content-length", str(len(refusal.body)).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": refusal.body})
