"""Processor time of telling 256 watches of one update, against sending the same bytes to 256 bare streams.

What an update takes that nobody watches is subtracted, on both sides: it is the fan-out that is compared.
The reference (`bare_streams.py`) is the HTTP server alone, on the same event loop. Both are measured in
turns, and medians of all rounds are shown. The note has what a watched update takes as a whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from bench import population, servers
from bench.bare_streams import HOLD, SEND
from bench.figures import Effort, Row, alone
from bench.http2 import Connection, crowd, files_for
from bench.servers import Server

WATCH = "/nvidia.device.v1alpha1.GpuService/WatchGpus"
UPDATE = "/nvidia.device.v1alpha1.ProviderService/UpdateGpuCondition"
WATCHES = 256
SHARED_BY = 8
"""Watches of a connection, where they share one."""
MUST = 1.2
WARM_UP_UPDATES = 5
Request = Callable[[int], bytes]
"""What is sent in a turn."""


def _change(turn: int) -> bytes:
    return population.change(0, turn)


class Audience:
    """Open streams, all of which hear of whatever is sent."""

    def __init__(self, server: Server, *, watch: str, send: str) -> None:
        self._server = server
        self._watch = watch
        self._send = send
        self._turn = 0
        self.last = b""

    def effort(self, request: Request, updates: int, watches: int, connections: int) -> float:
        """The server's processor time of one update, in seconds."""
        heard = answered = 0

        def hear(_: Connection, __: int, message: bytes) -> None:
            nonlocal heard
            heard += 1
            self.last = message

        def answer(_: Connection, __: int, ___: bytes) -> None:
            nonlocal answered
            answered += 1

        with crowd(self._server) as people:
            provider = people.connect(answer)
            held = [people.connect(hear) for _ in range(connections)]
            for index in range(watches):
                held[index % connections].call(self._watch, b"")
            people.until(lambda: heard == watches)  # the first message of each

            def update() -> None:
                self._turn += 1
                told, done = heard + watches, answered + 1
                provider.call(self._send, request(self._turn))
                people.until(lambda: heard >= told and answered >= done)
                if (heard, answered) != (told, done):
                    raise RuntimeError("somebody was told of one update twice")

            for _ in range(WARM_UP_UPDATES):
                update()
            before = self._server.cpu_seconds()
            for _ in range(updates):
                update()
            return (self._server.cpu_seconds() - before) / updates


def _row(ours: Audience, bare: Audience, effort: Effort, watches: int, connections: int) -> Row:
    found: dict[str, list[float]] = {"ours": [], "unwatched": [], "bare": [], "nobody": []}
    for _ in range(effort.rounds):
        found["unwatched"].append(ours.effort(_change, effort.updates, 0, 0))
        found["ours"].append(ours.effort(_change, effort.updates, watches, connections))
        event = ours.last
        again: Request = lambda _, event=event: event  # type: ignore[misc]  # noqa: E731
        found["nobody"].append(bare.effort(again, effort.updates, 0, 0))
        found["bare"].append(bare.effort(again, effort.updates, watches, connections))
        if bare.last != event:
            raise RuntimeError("the reference sent something else")
    ms = {name: statistics.median(each) * 1e3 for name, each in found.items()}
    fan_out, sent = ms["ours"] - ms["unwatched"], ms["bare"] - ms["nobody"]
    ratio = fan_out / sent if sent > 0 else math.inf  # a quick try may see more noise than fan-out
    return Row(
        figure=f"Telling {watches} watches over {connections} connections of an update, processor time",
        ours=f"{fan_out:.2f} ms",
        reference=f"{sent:.2f} ms",
        ratio=ratio,
        must_reach=f"at most {MUST:g} ×",
        reached=ratio <= MUST,
        note=f"with the update itself {ms['ours']:.2f} ms, unwatched {ms['unwatched']:.2f} ms;"
        f" of the reference {ms['bare']:.2f} and {ms['nobody']:.2f} ms",
    )


def measure(effort: Effort) -> Sequence[Row]:
    watches = effort.watches or WATCHES
    with (
        files_for(watches),
        servers.load_core() as core,
        servers.scratch() as directory,
        servers.fleetplane(directory / "data", core) as fleetplane,
        servers.bare_streams(directory, core) as bare,
    ):
        population.register(fleetplane, 1)
        ours = Audience(fleetplane, watch=WATCH, send=UPDATE)
        reference = Audience(bare, watch=HOLD, send=SEND)
        return [
            _row(ours, reference, effort, watches, connections)
            for connections in (max(1, watches // SHARED_BY), watches)
        ]


if __name__ == "__main__":
    alone(measure, __doc__)
