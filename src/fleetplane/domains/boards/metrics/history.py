"""Metrics of boards: current and over time, from both families of messages.

Percentages and degrees are gauges; what counts up on the board is a counter, so that its growth can be
queried over restarts. Metrics of original and of documented agents are stored under the same names. Original
agents send none by themselves, so they are polled.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

import structlog

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.domains.boards.inventory.boards import SERVER, Boards, status_of
from fleetplane.domains.boards.kinds import SCOPE, Board, BoardSilence, number_of
from fleetplane.domains.boards.ports import BoardMeasurements, MetricsIntake
from fleetplane.fleet.figures import Stretch
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, Unavailable
from fleetplane.kernel.telemetry import Point, PointBucket, Sample, Telemetry
from fleetplane.kernel.values.times import NS

INTERFACES_LIMIT = 16
DISKS_LIMIT = 16
ZONES_LIMIT = 16
"""Of each, those that are kept of one sample; a board has one or two."""
LABEL_LIMIT = 64

FLAT: Final = ("cpu_usage", "memory_usage", "temperature", "disk_usage")
_POWER: Final = (
    "under_voltage_now",
    "frequency_capped_now",
    "throttled_now",
    "soft_temp_limit_now",
    "under_voltage_seen",
    "frequency_capped_seen",
    "throttled_seen",
    "soft_temp_limit_seen",
)
_COUNTED: Final = ("bytes_sent", "bytes_recv", "packets_sent", "packets_recv", "err_in", "err_out")


def of_flat(metrics: pb.SystemMetrics, *, at_ns: int) -> BoardMeasurements:
    """What could not be read is left out: its zero would be taken for a value."""
    missing = frozenset(metrics.unavailable)
    gauges = {name: float(getattr(metrics, name)) for name in FLAT if name not in missing}
    if metrics.uptime_seconds:
        gauges["uptime_seconds"] = float(metrics.uptime_seconds)
    if metrics.HasField("power") and "power" not in missing:
        gauges.update({f"power/{name}": float(getattr(metrics.power, name)) for name in _POWER})
    counters = dict(_network((one.name, one) for one in metrics.interfaces))
    if metrics.HasField("detail"):
        nested = of_nested(metrics.detail, at_ns=at_ns)
        gauges = {**nested.gauges, **gauges}
        counters = {**nested.counters, **counters}
    return _sound(at_ns, gauges, counters)


def of_nested(metrics: pi_agent.SystemMetrics, *, at_ns: int) -> BoardMeasurements:
    """A group that is not there was not measured."""
    gauges: dict[str, float] = {}
    if metrics.HasField("cpu"):
        gauges["cpu_usage"] = metrics.cpu.usage_percent
    if metrics.HasField("memory"):
        gauges["memory_usage"] = metrics.memory.usage_percent
        gauges["memory_available_bytes"] = float(metrics.memory.available_bytes)
    for disk in metrics.disks[:DISKS_LIMIT]:
        if disk.mountpoint == "/":
            gauges["disk_usage"] = disk.usage_percent
        gauges[f"disk/{_label(disk.mountpoint)}/usage"] = disk.usage_percent
    zones = metrics.thermal.zones[:ZONES_LIMIT]
    if zones:
        gauges["temperature"] = max(zone.temperature_celsius for zone in zones)
    if metrics.HasField("load"):
        gauges["load1"] = metrics.load.load1
    if metrics.HasField("processes"):
        gauges["processes"] = float(metrics.processes.total)
    return _sound(at_ns, gauges, dict(_network((one.interface, one) for one in metrics.network)))


def _network(
    interfaces: Iterable[tuple[str, pb.NetworkInterface | pi_agent.NetworkMetrics]],
) -> Iterator[tuple[str, float]]:
    for number, (name, counts) in enumerate(interfaces):
        if number == INTERFACES_LIMIT:
            return
        for field in _COUNTED:
            yield f"network/{_label(name)}/{field}", float(getattr(counts, field))


def _label(text: str) -> str:
    return text[:LABEL_LIMIT]


def _sound(at_ns: int, gauges: dict[str, float], counters: dict[str, float]) -> BoardMeasurements:
    return BoardMeasurements(
        at_ns=at_ns,
        gauges={name: value for name, value in gauges.items() if math.isfinite(value)},
        counters=counters,
    )


FRESH_NS: Final = 300 * NS
"""How old a board's last figure may be to stand for now: ten reports of 30 s."""
SERIES_LIMIT: Final = 256
"""Characters of a series' name."""
LATEST_LIMIT: Final = 32
"""Series of one answer about now."""


@dataclass(slots=True, eq=False)
class MetricsHistory:
    telemetry: Telemetry | None
    _: KW_ONLY
    boards: Boards
    links: NodeLinks
    clock: Clock

    def __repr__(self) -> str:
        return f"<MetricsHistory {self.telemetry!r}>"

    async def over(self, boards: Collection[int], series: str, stretch: Stretch) -> Sequence[PointBucket]:
        """A series of these boards together, summed up by step."""
        _check_series(series)
        width_ns = stretch.width_ns()
        sources = [str(self._number(board)) for board in boards]
        return await self._kept().buckets(
            SCOPE, series, from_ns=stretch.from_ns, to_ns=stretch.to_ns, width_ns=width_ns, sources=sources
        )

    async def growth(self, boards: Collection[int], series: str, stretch: Stretch) -> Mapping[int, float]:
        """By board, how much a counter grew in the stretch, over all restarts."""
        _check_series(series)
        stretch.width_ns()
        sources = [str(self._number(board)) for board in boards]
        found = await self._kept().growth(
            SCOPE, series, from_ns=stretch.from_ns, to_ns=stretch.to_ns, sources=sources
        )
        return {int(source): grown for source, grown in found.items()}

    async def latest(
        self, boards: Collection[int], series: Sequence[str] = FLAT
    ) -> Mapping[int, Mapping[str, Sample]]:
        """By board and series, the last figure of the last minutes; without those that have none."""
        if len(series) > LATEST_LIMIT:
            raise InvalidArgument(f"more than {LATEST_LIMIT} series", field="series")
        now_ns = self.clock.now_ns()
        sources = [str(self._number(board)) for board in boards]
        found: dict[int, dict[str, Sample]] = {int(source): {} for source in sources}
        for name in series:
            _check_series(name)
            last = await self._kept().latest(
                SCOPE, name, from_ns=now_ns - FRESH_NS, to_ns=now_ns + FRESH_NS, sources=sources
            )
            for source, points in last.items():
                found[int(source)][name] = points[0]
        return found

    # At the board.

    async def now(self, board: int, *, asked: CallOrigin) -> BoardMeasurements:
        """As the board measures this moment; raises what its absence stands for."""
        found = self.boards.require(board)
        at_ns = self.clock.now_ns()
        if status_of(found).speaks_original:
            nested = await self.links.call(
                board,
                lambda link: link.original.GetSystemMetrics,
                pi_agent.GetSystemMetricsRequest(),
                pi_agent.GetSystemMetricsResponse,
                asked=asked,
            )
            return of_nested(nested.metrics, at_ns=at_ns)
        return of_flat(await self.flat(board, asked=asked), at_ns=at_ns)

    async def flat(self, board: int, *, asked: CallOrigin) -> pb.SystemMetrics:
        """All that one of our own agents says, as it says it."""
        return await self.links.call(
            board, lambda link: link.node.GetSystemMetrics, pb.Empty(), pb.SystemMetrics, asked=asked
        )

    async def nested(self, board: int, *, asked: CallOrigin) -> pi_agent.SystemMetrics:
        """In the original's words, which every agent knows."""
        answer = await self.links.call(
            board,
            lambda link: link.original.GetSystemMetrics,
            pi_agent.GetSystemMetricsRequest(),
            pi_agent.GetSystemMetricsResponse,
            asked=asked,
        )
        return answer.metrics

    async def health(self, board: int, *, asked: CallOrigin) -> pb.HealthStatus:
        """The health that an agent reports; an original agent reports fewer fields."""
        if not status_of(self.boards.require(board)).speaks_original:
            return await self.links.call(
                board, lambda link: link.node.HealthCheck, pb.Empty(), pb.HealthStatus, asked=asked
            )
        answer = await self.links.call(
            board,
            lambda link: link.original.AgentHealth,
            pi_agent.AgentHealthRequest(),
            pi_agent.AgentHealthResponse,
            asked=asked,
        )
        # The same numbers and types; only the words differ.
        health = pb.HealthStatus.FromString(answer.SerializeToString())
        health.status = "OK" if health.status == "ok" else health.status.upper()
        return health

    def _number(self, board: int) -> int:
        self.boards.require(board, field="board")
        return board

    def _kept(self) -> Telemetry:
        if self.telemetry is None:
            raise Unavailable("this server keeps no metrics")
        return self.telemetry


def _check_series(series: str) -> None:
    if not series or len(series) > SERIES_LIMIT or not series.isprintable():
        raise InvalidArgument(f"series must have 1 to {SERIES_LIMIT} characters", field="series")


log = structlog.get_logger(__name__)

AT_ONCE: Final = 8
"""Boards asked at the same time; each answers within a second, or is asked again at the next turn."""


class OriginalMetrics:
    def __init__(
        self,
        *,
        boards: Boards,
        links: NodeLinks,
        history: MetricsHistory,
        intake: MetricsIntake,
        clock: Clock,
        every_seconds: float,
    ) -> None:
        self._boards = boards
        self._links = links
        self._history = history
        self._intake = intake
        self._clock = clock
        self._every_seconds = every_seconds
        self._room = asyncio.Semaphore(AT_ONCE)

    def __repr__(self) -> str:
        return f"<OriginalMetrics every {self._every_seconds:g}s>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._clock.sleep(self._every_seconds)
            async with Boundary() as tasks:
                for board in self._boards.all():
                    if self._is_asked(board):
                        tasks.once(
                            "boards/original-metrics-of",
                            partial(self._ask, number_of(board)),
                            about=board.name,
                        )

    def _is_asked(self, board: Board) -> bool:
        status = status_of(board)
        return (
            status.speaks_original and status.silence is BoardSilence.NONE and self._links.is_callable(board)
        )

    async def _ask(self, number: int) -> None:
        async with self._room:
            try:
                sample = await self._history.now(number, asked=CallOrigin(actor=SERVER))
            except FleetplaneError as error:  # whether it is there at all is told elsewhere
                log.debug("boards.original_metrics_missed", board=number, error=error.message)
                return
            self._intake.metrics(number, sample)


class BoardRecords:
    """A `MetricsIntake` whose series are kept in the scope `boards`, the board's number as their source."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def __repr__(self) -> str:
        return f"<BoardRecords {self._telemetry!r}>"

    def metrics(self, board: int, sample: BoardMeasurements) -> bool:
        return self._telemetry.offer(points=list(_points(board, sample)))


def _points(board: int, sample: BoardMeasurements) -> Iterator[Point]:
    for counter, values in ((False, sample.gauges), (True, sample.counters)):
        for series, value in values.items():
            yield Point(
                scope=SCOPE,
                series=series,
                source=str(board),
                at_ns=sample.at_ns,
                value=value,
                counter=counter,
            )
