"""How long callers of a boards server wait, while its boards report and their logs are followed."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from websockets.sync.client import connect

from bench.servers import Server

PIN = 17
EVENT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds, of all calls of a kind."""

    seconds: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95(self) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, round(len(self.seconds) * 0.95))]

    def __str__(self) -> str:
        named = (("median", self.median), ("p95", self.p95), ("worst", max(self.seconds)))
        told = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in named)
        return f"{told}; {len(self.seconds)} calls"


class Web:
    """One caller with one connection, who waits for each answer."""

    def __init__(self, server: Server, token: str) -> None:
        self._connection = http.client.HTTPConnection(server.host, server.port, timeout=60.0)
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[float, Any]:
        """The seconds it took, and the answer."""
        sent = None if body is None else json.dumps(body)
        begun = time.perf_counter()
        self._connection.request(method, f"/api/v1{path}", body=sent, headers=self._headers)
        answer = self._connection.getresponse()
        raw = answer.read()
        took = time.perf_counter() - begun
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {raw[:300]!r}")
        return took, json.loads(raw)

    def close(self) -> None:
        self._connection.close()


def reads(web: Web, boards: Sequence[int], count: int) -> Times:
    """A page of boards and single boards, in turns."""
    paths = [
        "/nodes?limit=50" if turn % 2 else f"/nodes/{boards[turn % len(boards)]}" for turn in range(count)
    ]
    return Times(seconds=[web.ask("GET", path)[0] for path in paths])


def outputs(web: Web, boards: Sequence[int]) -> list[int]:
    """A pin of each board, ready to be driven; the devices' numbers."""
    made = []
    for board in boards:
        body = {"name": f"lamp-{board}", "node_id": board, "pin_number": PIN, "direction": "output"}
        made.append(int(web.ask("POST", "/gpio", body)[1]["data"]["id"]))
    return made


def drives(web: Web, devices: Sequence[int], count: int) -> Times:
    """A pin is driven, and the board has answered."""
    took = []
    for turn in range(count):
        value = turn // len(devices) % 2
        seconds, said = web.ask("POST", f"/gpio/{devices[turn % len(devices)]}/write", {"value": value})
        if said["value"] != value:
            raise RuntimeError(f"the board did not follow: {said}")
        took.append(seconds)
    return Times(seconds=took)


def updates(server: Server, token: str, web: Web, device: int, count: int) -> Times:
    """From asking for a level until somebody else, who watches, is told of it."""
    took = []
    web.ask("POST", f"/gpio/{device}/write", {"value": 0})
    with connect(f"ws://{server.authority}/ws?v=events&token={token}", proxy=None) as watching:
        for turn in range(count):
            level = 1 - turn % 2
            begun = time.perf_counter()
            web.ask("POST", f"/gpio/{device}/write", {"value": level})
            while not _tells(json.loads(watching.recv(timeout=EVENT_SECONDS)), device, level):
                pass
            took.append(time.perf_counter() - begun)
    return Times(seconds=took)


def _tells(event: dict[str, Any], device: int, level: int) -> bool:
    data = event.get("data", {})
    return event["type"] == "gpio.state.changed" and (data["device_id"], data["value"]) == (device, level)
