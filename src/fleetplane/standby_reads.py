"""What a server does while it stands by: everything for which no server is special.

Every call passes the gate first (`read_gate.py`): what was acknowledged anywhere before it came is in the
answer. What needs the active server is refused, naming it. Listeners are open on which every server answers
something, and domains that serve agents everywhere have their controllers for those that are here.
Nothing that the server needs for taking over depends on this: what fails here is begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog
from prometheus_client import CollectorRegistry

from fleetplane import assembly
from fleetplane.domains.blueprint import Blueprint, Domain, Kernel
from fleetplane.front import Front
from fleetplane.grpc_apps import keep_to_rights
from fleetplane.kernel.attention import Attention, AttentionCollector
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.revocation_lists import RevocationLists
from fleetplane.kernel.store import Store
from fleetplane.kernel.store.bells.metrics import BellCollector
from fleetplane.kernel.store.metrics import StoreCollector
from fleetplane.kernel.store.servers.read_index import FRESH_SECONDS
from fleetplane.kernel.store.servers.standby import Standby
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.kernel.telemetry.metrics import TelemetryCollector
from fleetplane.kernel.watchdog import Watchdog
from fleetplane.keys import MasterKeys
from fleetplane.read_gate import ReadGate, elsewhere
from fleetplane.rpc import CallStatistics
from fleetplane.settings import Settings
from fleetplane.web.merged_metrics import Merged
from fleetplane.web.ops import Readiness

log = structlog.get_logger(__name__)

BEGIN_SECONDS = 1.0
"""Before reads are served: who is alone, or first, is active by then."""
RETRY_SECONDS = 5.0
LOOK_SECONDS = 0.5
STALE_SECONDS = 5.0
"""Without a renewal for this long, watches end: silent no longer means that nothing happened."""
GRACE_SECONDS = 0.5
"""For answers under way when this server becomes active; watches end, and go on wherever they connect."""


class StandbyReads:
    """See `serve`."""

    def __init__(
        self,
        settings: Settings,
        keys: MasterKeys,
        blueprints: Sequence[Blueprint],
        clock: Clock,
        watchdog: Watchdog,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._blueprints = blueprints
        self._keeps_telemetry = any(one.keeps_telemetry for one in blueprints)
        self._clock = clock
        self._watchdog = watchdog
        self._standby: Standby | None = None

    def gate(self, store: Store) -> ReadGate | None:
        """The gate of a server that is active; None where no other server uses the same database."""
        return None if self._standby is None else ReadGate(self._standby, store, active=True)

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
        """Answer until memory is stale."""
        await standby.index.confirm()
        async with contextlib.AsyncExitStack() as stack:
            registry = CollectorRegistry()
            kernel = await self._kernel(standby, stack)
            domains = await assembly.build(
                self._settings, kernel, verify_audit=self._verify_elsewhere, stands_by=True
            )
            with kernel.store.writing_here():
                for domain in domains:
                    await domain.prepare_here()
            gate = ReadGate(standby, kernel.store, active=False)
            front = Front(
                self._settings,
                kernel,
                self._blueprints,
                domains,
                registry,
                gate=gate,
                watchdog=self._watchdog,
                stands_by=True,
            )
            front.ops.readiness = Readiness.STANDBY
            front.ops.reads = lambda: gate.is_fresh
            front.ops.elsewhere = lambda: gate.elsewhere().message
            _collect(registry, kernel, domains)
            await front.health.standing_by(reads=True)
            await front.open(stack, grace_seconds=GRACE_SECONDS)
            for domain in domains:
                domain.opened(front.addresses)
            stack.push_async_callback(_drained, domains, front)
            log.info("standby.reads_served", **front.addresses)
            async with asyncio.TaskGroup() as tasks:
                beside = self._beside(tasks, kernel, front)
                with kernel.store.writing_here():  # in whose context these begin
                    beside += [tasks.create_task(one.run_here(), name=f"standby/{one!r}") for one in domains]
                while standby.index.silent_seconds <= STALE_SECONDS:
                    # Watches look by themselves whether their caller may still read, in memory.
                    with contextlib.suppress(TimeoutError):  # and are ended in time, whatever hangs
                        async with asyncio.timeout(FRESH_SECONDS):
                            await kernel.store.refreshed()
                    await front.health.standing_by(reads=gate.is_fresh)
                    await self._clock.sleep(LOOK_SECONDS)
                for task in beside:
                    task.cancel()
        log.info("standby.reads_end", silent_seconds=round(standby.index.silent_seconds, 1))

    def _verify_elsewhere(self, *_: object) -> NoReturn:
        """Archives of the audit log lie with the server that is active."""
        assert self._standby is not None
        raise elsewhere(self._standby)

    def _beside(self, tasks: asyncio.TaskGroup, kernel: Kernel, front: Front) -> list[asyncio.Task[None]]:
        work: dict[str, Coroutine[Any, Any, None]] = {
            "revocations": kernel.revocations.run(),
            "rights": keep_to_rights(front.apps.values(), self._clock),
            "attention": kernel.attention.run(),
            "warden": front.warden.run(),
            "presenting": front.presenting.run(),
        }
        return [tasks.create_task(one, name=f"standby-{name}") for name, one in work.items()]

    async def _kernel(self, standby: Standby, stack: contextlib.AsyncExitStack) -> Kernel:
        """What domains stand on, over a store that refuses writes: keys that do not exist are not made."""
        store = standby.store.reader(lambda: elsewhere(standby))
        clock = store.clock
        master = self._keys.master(may_create=False)
        telemetry = None
        if self._keeps_telemetry:
            file = Path(self._settings.data_dir) / "telemetry.db"
            url = self._settings.store.url
            limits = assembly.telemetry_limits(self._settings)
            opening = Telemetry.open(file, clock, limits=limits, url=url, sweeps=False)
            telemetry = await stack.enter_async_context(opening)
        authority = await Authority.load_or_create(store, master, clock)
        return Kernel(
            store=store,
            clock=clock,
            attention=Attention(clock),
            calls=CallStatistics(),
            master=master,
            authority=authority,
            revocations=Revocations(store, clock),
            telemetry=telemetry,
            operators=await Operators.load(store, master, clock),
            revocation_lists=RevocationLists(store, authority, clock),
        )


async def _drained(domains: Iterable[Domain], front: Front) -> None:
    """End watches, each with where to go on, and streams of agents; then what is left."""
    for domain in domains:
        domain.drain()
    await front.drain(GRACE_SECONDS)


def _collect(registry: CollectorRegistry, kernel: Kernel, domains: Iterable[Domain]) -> None:
    registry.register(StoreCollector(kernel.store))
    registry.register(BellCollector(kernel.store))
    registry.register(kernel.calls.collector())
    registry.register(AttentionCollector(kernel.attention))
    if kernel.telemetry is not None:
        registry.register(TelemetryCollector(kernel.telemetry))
    registry.register(Merged(collector for domain in domains for collector in domain.collectors))
