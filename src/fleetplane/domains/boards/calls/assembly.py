"""The half of the boards domain that calls boards, put together: pins, commands, logs, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.boards.ca.requests import CertificateRequests
from fleetplane.domains.boards.ca.rules import CERTIFICATE_REQUEST
from fleetplane.domains.boards.calls.channels import NodeLinks
from fleetplane.domains.boards.commands.courier import BOARD_CALLER, BoardCommander
from fleetplane.domains.boards.commands.runs import BOARD_RUN, BoardChannel, BoardRuns
from fleetplane.domains.boards.core import BoardCore
from fleetplane.domains.boards.grpc.certificates import CertificateMethods
from fleetplane.domains.boards.grpc.pins import GpioMethods
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, number_of
from fleetplane.domains.boards.logs.relay import LogsRelay
from fleetplane.domains.boards.metrics.history import MetricsHistory
from fleetplane.domains.boards.pins.client import PinsOfNode
from fleetplane.domains.boards.pins.controller import GpioController, GpioPolicy
from fleetplane.domains.boards.pins.driver import PinDriver
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE
from fleetplane.domains.boards.pins.turns import PIN_TURN, PinTurns
from fleetplane.fleet.runs.resources import RunCollector
from fleetplane.fleet.runs.runs import Runs
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.reconcile.reconciler import ReconcileCollector
from fleetplane.kernel.watch import EventType

PREFIX = "fleetplane_boards_"


class NodeCollector(Collector):
    def __init__(self, links: NodeLinks, logs: LogsRelay, commander: BoardCommander) -> None:
        self._links = links
        self._logs = logs
        self._commander = commander

    def collect(self) -> Iterator[Metric]:
        links, logs = self._links.statistics(), self._logs.statistics()
        gauges = (
            ("channels", "Channels to boards that are open", links.channels),
            ("calls", "Calls to boards under way, streams among them", links.calls),
            ("log_readers", "Readers of boards' logs", logs.readers),
            ("commands_open", "Targets of commands without an outcome", self._commander.ledger.open_count),
        )
        counters = (
            ("calls_made", "Calls to boards", links.made),
            ("calls_failed", "Calls to boards that found nobody, or no answer in time", links.lost),
            ("log_entries", "Log entries passed on", logs.entries),
            ("log_entries_dropped", "Log entries that boards dropped for slow readers", logs.dropped),
            ("log_streams_resumed", "Log streams that went on after a broken connection", logs.resumed),
            ("log_readers_refused", "Readers of logs for whom there was no room", logs.refused),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(PREFIX + name, text, value=value)


log = structlog.get_logger(__name__)

KINDS = (GPIO_DEVICE, PIN_TURN, CERTIFICATE_REQUEST, BOARD_RUN, BOARD_CALLER)
ARRIVALS_LIMIT = 65_536
"""Boards waiting to be given what waited for them; one that finds no room has its commands time out."""


class NodeSide:
    def __init__(self, core: BoardCore, *, gpio_policy: GpioPolicy | None = None) -> None:
        kernel, options = core.kernel, core.options
        store, clock = kernel.store, kernel.clock
        self._core = core
        self.links = NodeLinks(
            boards=core.boards,
            authority=kernel.authority,
            revocations=kernel.revocations,
            clock=clock,
            own_name=options.own_name,
            plain=options.plain,
        )
        self.devices = core.devices
        self.pins = PinsOfNode(self.links, core.boards, clock)
        self.driver = PinDriver(self.devices, self.pins, PinTurns(store, clock), clock, kernel.telemetry)
        self.gpio = GpioController(
            store=store,
            clock=clock,
            boards=core.boards,
            devices=self.devices,
            pins=self.pins,
            links=self.links,
            driver=self.driver,
            policy=gpio_policy,
        )
        self.commander = BoardCommander(
            store, clock, boards=core.boards, links=self.links, attention=core.kernel.attention
        )
        self.runs: BoardRuns = Runs(
            store,
            clock,
            BoardChannel(boards=core.boards, commander=self.commander, clusters=self._cluster_names),
        )
        self.logs = LogsRelay(boards=core.boards, links=self.links, clock=clock)
        self.history = MetricsHistory(kernel.telemetry, boards=core.boards, links=self.links, clock=clock)
        self.requests = CertificateRequests(
            store, kernel.authority, core.certificates, domains=options.certificate_domains
        )
        self.certificate_methods = CertificateMethods(
            store=store,
            authority=kernel.authority,
            revocations=kernel.revocations,
            certificates=core.certificates,
            requests=self.requests,
            clock=clock,
        )
        self._arrived: asyncio.Queue[int] = asyncio.Queue(ARRIVALS_LIMIT)
        core.controller.on_arrival(self._came)

    def __repr__(self) -> str:
        return f"<NodeSide {self.links!r} {self.devices!r} {self.commander!r}>"

    def methods(self) -> Iterable[object]:
        """Parts of the original controller's service."""
        kernel = self._core.kernel
        yield GpioMethods(devices=self.devices, driver=self.driver, clock=kernel.clock)
        yield self.certificate_methods

    @property
    def collectors(self) -> Sequence[Collector]:
        return (
            ReconcileCollector(lambda: (self.gpio.reconciler,)),
            NodeCollector(self.links, self.logs, self.commander),
            RunCollector(self.runs, domain="boards"),
        )

    # Life.

    async def prepare_here(self) -> None:
        await self.commander.prepare_here()
        await self.runs.prepare_here()

    async def take_over(self) -> None:
        await self.commander.take_over()
        await self.runs.take_over()

    async def run_here(self) -> None:
        """Tell what becomes of commands and runs, until cancelled."""
        try:
            async with Boundary() as tasks:
                tasks.keep("boards/commands", self.commander.run_here)
                tasks.keep("boards/runs", self.runs.run_here)
                tasks.keep("boards/arrivals", self._follow_arrivals)
        finally:
            await self.links.close()

    async def run_active(self) -> None:
        """Call boards until cancelled; then nobody is called any more."""
        try:
            async with Boundary() as tasks:
                tasks.keep("boards/gpio", self.gpio.run)
                tasks.keep("boards/calls", self.commander.run_active)
                tasks.keep("boards/old-runs", self.runs.run_active)
                tasks.keep("boards/arrivals", self._welcome)
                tasks.keep("boards/deletions", self._follow_deletions)
        finally:
            await self.links.close()

    def _came(self, board: int) -> None:
        """An agent has registered: what was open to the one before it is of no use."""
        self.links.drop(board)
        self.gpio.came(board)
        if not self._arrived.full():
            self._arrived.put_nowait(board)

    async def _welcome(self) -> None:
        while True:
            board = await self._arrived.get()
            await self._tolerated(self.commander.arrived(board))

    async def _follow_arrivals(self) -> None:
        """While this server stands by: call boards anew that have registered anywhere, or are gone."""
        known = {board.name: status_of(board).arrivals for board in self._core.boards.all()}
        async with self._core.kernel.store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    name, arrivals = event.resource.name, status_of(event.resource).arrivals
                    if event.type is EventType.DELETED:
                        known.pop(name, None)
                    elif known.get(name) == arrivals:
                        continue
                    else:
                        known[name] = arrivals
                    if not self._core.kernel.store.leads:  # else it is told of arrivals, and has dropped it
                        self.links.drop(int(name))

    async def _follow_deletions(self) -> None:
        async with self._core.kernel.store.watch(BOARD, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    if event.type is EventType.DELETED:
                        number = number_of(event.resource)
                        self.links.drop(number)
                        await self._tolerated(self.commander.removed(number))

    async def _tolerated(self, chore: Awaitable[None]) -> None:
        with contained("boards/calls"):  # the ledger's deadlines see to what is left
            await chore

    def _cluster_names(self) -> dict[int, str]:
        return {number_of(cluster): cluster.spec.name for cluster in self._core.clusters.all()}
