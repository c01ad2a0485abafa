"""From starting the command, with all domains, until its ready file is there: on new data, and on much."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import population, servers
from bench.figures import Effort, Row, alone

GPUS = 576
MUST_SECONDS = 2.0


def _started(data_dir: Path, core: int) -> float:
    with servers.fleetplane(data_dir, core, domains="") as server:
        return server.started_seconds


def measure(effort: Effort) -> Sequence[Row]:
    gpus = effort.gpus or GPUS
    with servers.load_core() as core, servers.scratch() as directory:
        fresh = [_started(directory / f"data-{number}", core) for number in range(effort.rounds)]
        with servers.fleetplane(directory / "full", core, domains="") as server:
            population.register(server, gpus)
        full = [_started(directory / "full", core) for _ in range(effort.rounds)]
    return [
        _row("Cold start, new data directory", fresh),
        _row(f"Cold start, {gpus} GPUs stored", full),
    ]


def _row(figure: str, seconds: Sequence[float]) -> Row:
    median = statistics.median(seconds)
    return Row(
        figure=figure,
        ours=f"{median:.2f} s",
        reference="",
        ratio=None,
        must_reach=f"under {MUST_SECONDS:g} s",
        reached=median < MUST_SECONDS,
        note=f"{min(seconds):.2f} s to {max(seconds):.2f} s",
    )


if __name__ == "__main__":
    alone(measure, __doc__)
