"""Logs and figures of boards, as the resource API tells them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.wire import message_json
from fleetplane.fleet.figures import CPU, DISK, MEMORY, Figures, Measure, MeasuredSeries, Stretch
from fleetplane.fleet.resources.declaration import LogCall, LogLine
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument, Unavailable
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.values.timestamps import timestamp

LEVELS: Final = {name.lower(): name for name in pb.LogEntry.LogLevel.keys() if name != "UNSPECIFIED"}  # noqa: SIM118
SOURCES: Final = ("journal", "kernel", "agent")
FILE: Final = "file:"
"""Before the name of a file that a board is told to follow."""
MEASURES: Final = {
    "cpu_usage": CPU,
    "memory_usage": MEMORY,
    "disk_usage": DISK,
    "temperature": Measure(
        name="temperatureCelsius", title="Temperature", unit="°C", most=200.0, least=-100.0, high=80.0
    ),
}
"""By series."""


async def logs(call: LogCall) -> AsyncGenerator[LogLine, None]:
    """What a board writes down, read at the board. A source is one of its own, or a unit."""
    query, domain = call.query, call.domain
    if query.level and query.level not in LEVELS:
        raise InvalidArgument(f"is not one of {', '.join(LEVELS)}", field="level")
    is_source = query.source in SOURCES or query.source.startswith(FILE)
    wanted = pb.LogFilter(
        min_level=LEVELS[query.level] if query.level else None,
        units=[query.source] if query.source and not is_source else [],
        sources=[query.source] if is_source else [],
        contains=query.contains,
        # To a board, 0 is nothing said: what is meant is nothing from before.
        since=None if query.tail else timestamp(domain.core.kernel.clock.now_ns()),
        tail_lines=query.tail,
        follow=query.follow,
    )
    asked = CallOrigin(actor=call.actor)
    async with aclosing(domain.nodes.logs.read(int(call.stored.name), wanted, asked=asked)) as entries:
        async for entry in entries:
            if entry.message or entry.dropped:  # the rest are signs of life
                yield _line(entry)


def _line(entry: pb.LogEntry) -> LogLine:
    told = message_json.plain(entry)
    return LogLine(
        at=told["timestamp"] or "",
        level=told["level"],
        source=entry.unit or entry.source,
        message=entry.message,
        dropped=entry.dropped,
    )


async def figures(domain: Any, boards: Sequence[AnyResource]) -> Mapping[str, Figures]:
    """The latest of the last minutes; nothing of boards that reported none."""
    try:
        found = await domain.nodes.history.latest([int(board.name) for board in boards])
    except Unavailable:  # this server keeps none
        return {}
    return {
        str(number): Figures(
            at_ns=max(one.at_ns for one in samples.values()),
            values={MEASURES[name].name: one.value for name, one in samples.items() if name in MEASURES},
        )
        for number, samples in found.items()
        if samples
    }


async def history(domain: Any, board: AnyResource, stretch: Stretch) -> Sequence[MeasuredSeries]:
    """What a board measured over time; nothing where this server keeps none."""
    kept = domain.nodes.history
    try:
        found = [
            MeasuredSeries(measure=measure, buckets=await kept.over([int(board.name)], series, stretch))
            for series, measure in MEASURES.items()
        ]
    except Unavailable:
        return ()
    return [one for one in found if one.buckets]
