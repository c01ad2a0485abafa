"""The two servers of the edge figures, and how each is asked what the figures need to know."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import servers
from bench.edge_bare import COUNT, FAN
from bench.edge_fleet import Fleet, Secured
from bench.http2 import RECEIVE_BYTES, crowd
from bench.servers import Server

ORDER = {
    "target": "all",
    "tool": "cmd.run",
    "args": {"command": "true"},
    "mode": "parallel",
    "failure_policy": "continue",
}
RESULT, OVER = b"event: command_result\n", b"event: fleet_result\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A server with nobody connected yet."""

    server: Server
    fleet: Fleet
    heard: Callable[[], int]
    """Heartbeats that were taken so far; of the reference, all messages."""
    counts_heartbeats: bool = True
    send: Callable[[], tuple[float, float]]
    """One command to all; the seconds until the first and the last daemon's result."""


@contextlib.contextmanager
def fleetplane(data: Path, operator: str, core: int, *, tls: bool, connections: int) -> Iterator[Subject]:
    """The product, with the daemons that are enrolled in its data directory."""
    settings = (
        f"listeners.edge.tls={str(tls).lower()}",
        f"listeners.edge.connections={connections}",
        f"listeners.edge.connections_per_address={connections}",
    )
    with servers.fleetplane(data, core, settings, domains="edge") as started:
        listeners = json.loads(data.with_name(data.name + ".ready").read_text())["listeners"]
        host, _, port = listeners["edge"][0].rpartition("//")[2].rpartition(":")
        server = replace(started, host=host, port=int(port))
        with crowd(server) as people:
            fleet = Fleet(server, people, tls=tls)
            web = started.authority
            yield Subject(
                server=server,
                fleet=fleet,
                heard=lambda: _heartbeats(web),
                send=lambda: _run(web, operator, fleet),
            )


def _heartbeats(web: str) -> int:
    with urllib.request.urlopen(f"http://{web}/metrics") as answer:
        for line in answer:
            if line.startswith(b"fleetplane_edge_heartbeats_total "):
                return int(float(line.split()[1]))
    raise RuntimeError("the server does not say how many heartbeats it has heard")


def _run(web: str, operator: str, fleet: Fleet) -> tuple[float, float]:
    follower = Follower(web, operator, ORDER)
    with contextlib.closing(follower.socket):
        fleet.people.adopt(follower)
        fleet.people.until(lambda: follower.over is not None)
        fleet.people.forget(follower)
    if follower.results != len(fleet.daemons) or f'"ok":{len(fleet.daemons)}'.encode() not in follower.end:
        raise RuntimeError(f"not all {len(fleet.daemons)} did it: {follower.end.decode()}")
    assert follower.first is not None
    assert follower.over is not None
    return follower.first - follower.begun, follower.over - follower.begun


class Follower:
    """An operator who starts a run and reads its events until it is over."""

    def __init__(self, web: str, operator: str, order: dict[str, Any]) -> None:
        host, _, port = web.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        body = json.dumps(order).encode()
        request = (
            f"POST /v1/edge/fleet/invoke HTTP/1.1\r\nhost: {web}\r\nauthorization: Bearer {operator}\r\n"
            f"accept: text/event-stream\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.results = 0
        self.first: float | None = None
        self.over: float | None = None
        self.end = b""
        """The last of what was said."""
        self.begun = time.perf_counter()
        self.socket.sendall(request.encode() + body)

    def readable(self) -> None:
        chunk = self.socket.recv(RECEIVE_BYTES)
        if not chunk:
            raise RuntimeError(f"the server ended the events: {self.end.decode(errors='replace')}")
        # The end of the last chunk may be the beginning of a word.
        carry = self.end[-len(RESULT) + 1 :]
        found = (carry + chunk).count(RESULT)
        if found and self.first is None:
            self.first = time.perf_counter()
        self.results += found
        self.end = (self.end + chunk)[-4096:]
        if OVER in self.end and b"summary" in self.end.rpartition(OVER)[2]:
            self.over = time.perf_counter()


@contextlib.contextmanager
def bare(directory: Path, core: int, sample: bytes, *, tls: bool, connections: int) -> Iterator[Subject]:
    """The reference: streams with nothing behind them; it sends `sample` to all."""
    ready = directory / f"bare-{'tls' if tls else 'plain'}.ready"
    transport = "tls" if tls else "plain"
    command = [sys.executable, "-m", "bench.edge_bare", str(ready), transport, str(connections)]
    with servers._running("bare streams", command, ready, core) as started:
        # Its address was told with a scheme, of which only one is cut off there.
        server = replace(started, host=started.host.removeprefix("https://"))
        with crowd(server) as people:
            fleet = Fleet(server, people, tls=tls)
            answers: list[bytes] = []
            control = Secured(server, lambda _connection, _stream, said: answers.append(said), fleet.context)
            people.adopt(control)

            def ask(path: str, request: bytes) -> bytes:
                before = len(answers)
                control.call(path, request)
                people.until(lambda: len(answers) > before)
                return answers[-1]

            def send() -> tuple[float, float]:
                first, last = struct.unpack(">dd", ask(FAN, sample))
                return first, last

            yield Subject(
                server=server,
                fleet=fleet,
                send=send,
                counts_heartbeats=False,
                heard=lambda: int.from_bytes(ask(COUNT, b""), "big"),
            )


def sample_command(size: int) -> bytes:
    """A command of about this size that any daemon takes."""
    from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb

    call = pb.InvokeTool(command_id="cccccccc-1111-4222-8333-dddddddddddd", tool_name="cmd.run")
    call.seal_envelope.user_security_token = "t" * size
    return pb.EdgeCommand(invoke_tool=call).SerializeToString()
