"""What several servers that write to one PostgreSQL cost each other.

First: the changes per second of two servers while a third one, whose event loop is 30 ms late in every turn,
writes as well, against the same while it does not. Then: of three servers together, against one alone with as
many callers. Both in one run and in turns, medians of all rounds. All processes share the machine's cores.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import servers
from bench.figures import Effort, Row, alone
from tools.run_cluster import Cluster, Ports

CALLERS = 8
"""At each of three servers."""
START_SECONDS = 120.0
SETTLE_SECONDS = 0.3
MUST_BESIDE_LATE = 0.8
"""A late server costs the others less than a fifth."""
MUST_THREE = 0.5
"""More servers share connections and reads, not writes: whoever is slower runs its change again."""


class Writers:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def count(self, name: str) -> int:
        return int.from_bytes((self.folder / f"{name}.count").read_bytes(), "little")

    def steer(self, *, on: Sequence[str], late: Sequence[str] = ()) -> None:
        for name in ("one", "two", "three", "alone"):
            for suffix, wanted in (("on", on), ("late", late)):
                path = self.folder / f"{name}.{suffix}"
                if name in wanted:
                    path.touch()
                else:
                    path.unlink(missing_ok=True)
        time.sleep(SETTLE_SECONDS)

    def rate(self, names: Sequence[str], seconds: float) -> float:
        """Acknowledged changes a second, of all of them together."""
        before, begun = sum(map(self.count, names)), time.perf_counter()
        time.sleep(seconds)
        return (sum(map(self.count, names)) - before) / (time.perf_counter() - begun)


@contextlib.contextmanager
def _writers(folder: Path, url: str, callers: dict[str, int]) -> Iterator[Writers]:
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.cluster_writer", url, folder, name, str(count)],
            cwd=servers.ROOT,
            env={**os.environ, "PYTHONPATH": str(servers.ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, count in callers.items()
    ]
    try:
        deadline = time.monotonic() + START_SECONDS
        while not all((folder / f"{name}.ready").exists() for name in callers):
            if time.monotonic() > deadline or any(one.poll() is not None for one in children):
                raise RuntimeError("a writer did not start")
            time.sleep(0.05)
        yield Writers(folder)
    finally:
        for one in children:
            one.kill()
            one.wait()


def measure(effort: Effort) -> Sequence[Row]:
    with servers.scratch() as directory, contextlib.ExitStack() as stack:
        directory.chmod(0o755)
        cluster = Cluster(directory, Ports(0), stack)
        cluster.start_database()
        url = cluster.environment["FLEETPLANE_STORE__URL"]
        callers = {"one": CALLERS, "two": CALLERS, "three": CALLERS, "alone": 3 * CALLERS}
        writers = stack.enter_context(_writers(directory, url, callers))
        two, three = ("one", "two"), ("one", "two", "three")
        found: dict[str, list[float]] = {"without": [], "beside": [], "late": [], "three": [], "alone": []}
        for _ in range(effort.rounds):
            writers.steer(on=two)
            found["without"].append(writers.rate(two, effort.seconds))
            writers.steer(on=three, late=["three"])
            late = writers.count("three")
            found["beside"].append(writers.rate(two, effort.seconds))
            found["late"].append((writers.count("three") - late) / effort.seconds)
            writers.steer(on=three)
            found["three"].append(writers.rate(three, effort.seconds))
            writers.steer(on=["alone"])
            found["alone"].append(writers.rate(["alone"], effort.seconds))
    median = {name: statistics.median(each) for name, each in found.items()}
    return [
        _row(
            "Two servers that write beside one that is 30 ms late",
            median["beside"],
            median["without"],
            MUST_BESIDE_LATE,
            f"the late one itself: {statistics.mean(found['late']):,.1f}/s, whenever its turn comes",
        ),
        _row(
            "Three servers that write, against one with as many callers",
            median["three"],
            median["alone"],
            MUST_THREE,
            f"{3 * CALLERS} callers",
        ),
    ]


def _row(figure: str, ours: float, reference: float, must: float, note: str) -> Row:
    ratio = ours / reference if reference else 0.0
    return Row(
        figure=figure,
        ours=f"{ours:,.0f}/s",
        reference=f"{reference:,.0f}/s",
        ratio=ratio,
        must_reach=f"{must:g} ×",
        reached=ratio >= must,
        note=note,
    )


if __name__ == "__main__":
    alone(measure, __doc__)
