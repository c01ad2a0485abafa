"""What boards measured: over time, as it was kept, and now, as a board says when it is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.metrics import samples
from fleetplane.domains.boards.ports import BoardMeasurements
from fleetplane.fleet.figures import Stretch
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, Unavailable
from fleetplane.kernel.telemetry import PointBucket, Sample, Telemetry
from fleetplane.kernel.values.times import NS

FRESH_NS: Final = 300 * NS
"""How old a board's last figure may be to stand for now: ten reports of 30 s."""
SERIES_LIMIT: Final = 256
"""Characters of a series' name."""
LATEST_LIMIT: Final = 32
"""Series of one answer about now."""


class MetricsHistory:
    def __init__(
        self, telemetry: Telemetry | None, *, boards: Boards, links: NodeLinks, clock: Clock
    ) -> None:
        self._telemetry = telemetry
        self._boards = boards
        self._links = links
        self._clock = clock

    def __repr__(self) -> str:
        return f"<MetricsHistory {self._telemetry!r}>"

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
        self, boards: Collection[int], series: Sequence[str] = samples.FLAT
    ) -> Mapping[int, Mapping[str, Sample]]:
        """By board and series, the last figure of the last minutes; without those that have none."""
        if len(series) > LATEST_LIMIT:
            raise InvalidArgument(f"more than {LATEST_LIMIT} series", field="series")
        now_ns = self._clock.now_ns()
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
        found = self._boards.require(board)
        at_ns = self._clock.now_ns()
        if status_of(found).speaks_original:
            nested = await self._links.call(
                board,
                lambda link: link.original.GetSystemMetrics,
                pi_agent.GetSystemMetricsRequest(),
                pi_agent.GetSystemMetricsResponse,
                asked=asked,
            )
            return samples.of_nested(nested.metrics, at_ns=at_ns)
        return samples.of_flat(await self.flat(board, asked=asked), at_ns=at_ns)

    async def flat(self, board: int, *, asked: CallOrigin) -> pb.SystemMetrics:
        """All that one of our own agents says, as it says it."""
        return await self._links.call(
            board, lambda link: link.node.GetSystemMetrics, pb.Empty(), pb.SystemMetrics, asked=asked
        )

    async def nested(self, board: int, *, asked: CallOrigin) -> pi_agent.SystemMetrics:
        """In the original's words, which every agent knows."""
        answer = await self._links.call(
            board,
            lambda link: link.original.GetSystemMetrics,
            pi_agent.GetSystemMetricsRequest(),
            pi_agent.GetSystemMetricsResponse,
            asked=asked,
        )
        return answer.metrics

    async def health(self, board: int, *, asked: CallOrigin) -> pb.HealthStatus:
        """The health that an agent reports; an original agent reports fewer fields."""
        if not status_of(self._boards.require(board)).speaks_original:
            return await self._links.call(
                board, lambda link: link.node.HealthCheck, pb.Empty(), pb.HealthStatus, asked=asked
            )
        answer = await self._links.call(
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
        self._boards.require(board, field="board")
        return board

    def _kept(self) -> Telemetry:
        if self._telemetry is None:
            raise Unavailable("this server keeps no metrics")
        return self._telemetry


def _check_series(series: str) -> None:
    if not series or len(series) > SERIES_LIMIT or not series.isprintable():
        raise InvalidArgument(f"series must have 1 to {SERIES_LIMIT} characters", field="series")
