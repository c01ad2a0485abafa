"""What boards measured over time, handed to the kernel's telemetry."""

from __future__ import annotations

from collections.abc import Iterator

from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.ports import BoardMeasurements
from fleetplane.kernel.telemetry import Point, Telemetry


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
