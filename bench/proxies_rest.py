"""REST of proxies: reads and durable writes per second, against a bare Litestar that says hello.

Both servers run on the same HTTP server and event loop, on one core, and are measured in turns by
the same load. Ours checks a signed token, the caller's role and rate in every request; a write
also becomes a numbered version of its workspace's configuration, with its audit, on disk. Every
caller changes a host in a workspace of its own: changes to one workspace are made one after the
other, by design.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import httpx

from bench import rest, servers
from bench.figures import Effort, Row, against, alone
from bench.proxies_rollout import PASSWORD, settings
from bench.servers import Server
from bench.unary import Served

CALLERS = 64
MUST_READ = 0.35
MUST_WRITE = 0.07
"""A hello waits for no disk."""
HELLO = "/hello"


class Workspaces:
    """A virtual host in each of so many."""

    def __init__(self, server: Server, count: int) -> None:
        self._web = httpx.Client(base_url=f"http://{server.authority}/v1", timeout=60)
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        self.token = self._post("/auth/login", login)["access_token"]
        self._web.headers["Authorization"] = f"Bearer {self.token}"
        organization = self._post("/organizations", {"name": "Acme", "slug": "acme"})["id"]
        self.hosts = [self._host(organization, number) for number in range(count)]

    def _host(self, organization: str, number: int) -> str:
        place = {"name": "W", "slug": f"w{number}"}
        workspace = self._post(f"/organizations/{organization}/workspaces", place)["id"]
        location = {"path": "/", "proxy_pass": "http://127.0.0.1:9000"}
        body = {"name": "h", "server_name": "h.example", "listen_port": 80, "locations": [location]}
        return str(self._post(f"/workspaces/{workspace}/virtual-hosts", body)["id"])

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, str]:
        made: dict[str, str] = self._web.post(path, json=body).raise_for_status().json()
        return made

    def change(self, caller: int, turn: int) -> tuple[str, str, bytes]:
        body = json.dumps({"listen_port": 1000 + turn % 60_000}).encode()
        return "PATCH", f"/v1/virtual-hosts/{self.hosts[caller]}", body

    def greet(self, _caller: int, _turn: int) -> tuple[str, str, bytes]:
        return "PATCH", HELLO, b'{"listen_port": 1000}'


@contextlib.contextmanager
def _both() -> Iterator[tuple[Server, Server]]:
    with servers.load_core() as core, servers.scratch() as directory:
        ready = directory / "litestar.ready"
        command = [sys.executable, "-m", "bench.litestar_server", str(ready)]
        with (
            servers.fleetplane(
                directory / "data", core, settings(directory), domains="proxies"
            ) as fleetplane,
            servers._running("litestar", command, ready, core) as litestar,
        ):
            yield fleetplane, litestar


def measure(effort: Effort) -> Sequence[Row]:
    callers = 8 if effort.gpus is not None else CALLERS
    read: list[tuple[Served, Served]] = []
    written: list[tuple[Served, Served]] = []
    with _both() as (ours, litestar):
        made = Workspaces(ours, callers)
        path = f"/v1/virtual-hosts/{made.hosts[0]}"
        for _ in range(effort.rounds):
            read.append(
                (
                    rest.reads(ours, path, made.token, effort.seconds),
                    rest.reads(litestar, HELLO, made.token, effort.seconds),
                )
            )
            written.append(
                (
                    rest.writes(ours, made.change, made.token, callers=callers, seconds=effort.seconds),
                    rest.writes(litestar, made.greet, made.token, callers=callers, seconds=effort.seconds),
                )
            )
    return [
        _row("GET of a virtual host, against a bare Litestar", read, MUST_READ),
        _row(f"Durable PATCH of virtual hosts, {callers} callers, against the same", written, MUST_WRITE),
    ]


def _row(figure: str, rounds: Sequence[tuple[Served, Served]], must: float) -> Row:
    ours, reference = (max((one[side] for one in rounds), key=lambda one: one.rate) for side in (0, 1))
    return against(
        figure=figure,
        ours=ours.rate,
        reference=reference.rate,
        must=must,
        show=lambda rate: f"{rate:,.0f}/s",
        note=f"processor time a request {ours.cpu_us:.0f} µs, of the reference {reference.cpu_us:.0f} µs",
    )


if __name__ == "__main__":
    alone(measure, __doc__)
