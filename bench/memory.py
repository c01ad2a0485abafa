"""Resident memory with 1,024 GPUs and 256 watchers, after every watcher has had a burst of updates."""

from __future__ import annotations

from collections.abc import Sequence

from bench import population, servers
from bench.figures import Effort, Row, alone
from bench.http2 import Connection, crowd, files_for

WATCH = "/nvidia.device.v1alpha1.GpuService/WatchGpus"
UPDATE = "/nvidia.device.v1alpha1.ProviderService/UpdateGpuCondition"
GPUS = 1024
WATCHERS = 256
LIMIT_BYTES = 150 * 1000 * 1000
BURST_UPDATES = 256
BURST_AT_ONCE = 16


class _Counter:
    def __init__(self) -> None:
        self.messages = 0

    def count(self, connection: Connection, stream: int, message: bytes) -> None:
        self.messages += 1


def measure(effort: Effort) -> Sequence[Row]:
    gpus, watchers = effort.gpus or GPUS, effort.watches or WATCHERS
    updates = BURST_UPDATES if effort.gpus is None else BURST_AT_ONCE
    with (
        files_for(watchers),
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "data", core) as server,
        crowd(server) as people,
    ):
        idle = server.resident_bytes()
        population.register(server, gpus)
        registered = server.resident_bytes()
        events, answers = _Counter(), _Counter()
        for _ in range(watchers):
            people.connect(events.count).call(WATCH, b"")
        people.until(lambda: events.messages == gpus * watchers)
        watched = server.resident_bytes()
        provider = people.connect(answers.count)
        for update in range(updates):
            people.until(lambda sent=update: answers.messages > sent - BURST_AT_ONCE)  # type: ignore[misc]
            provider.call(UPDATE, population.change(update % gpus, 1 + update // gpus))
        people.until(lambda: answers.messages == updates)
        # Changes that a watcher sees late are coalesced, so only the end is certain to come.
        final, peak = server.resident_bytes(), server.peak_resident_bytes()
    return [
        Row(
            figure=f"Resident memory, {gpus:,} GPUs and {watchers} watchers",
            ours=_shown(final),
            reference="",
            ratio=None,
            must_reach=f"under {_shown(LIMIT_BYTES)}",
            reached=final < LIMIT_BYTES,
            note=f"idle {_shown(idle)}, with the GPUs {_shown(registered)}, "
            f"with the watchers {_shown(watched)}, after {updates} updates {_shown(final)}, "
            f"at most {_shown(peak)}",
        )
    ]


def _shown(count: int) -> str:
    return f"{count / 1_000_000:.0f} MB"


if __name__ == "__main__":
    alone(measure, __doc__)
