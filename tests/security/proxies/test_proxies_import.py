"""One tenant's import must not keep everybody else waiting, however large or wrong it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.proxies.proxy_api import rest_api

from fleetplane.domains.proxies.kinds.records import VirtualHostSpec
from fleetplane.domains.proxies.rules import conflicts as clashes
from fleetplane.domains.proxies.rules import validation as rules
from fleetplane.domains.proxies.rules.conflicts import HostNeighbours, WorkspaceSurroundings

STALL_SECONDS = 1.0
"""The attack took 12 s; a machine that does many other things at once takes a fraction of one now."""


def bundle(hosts: int, *, server_name: str = "host-{}.example.com", port: int = 80) -> dict[str, Any]:
    return {
        "format": "fleetplane.proxies/1",
        "virtual_hosts": [
            {
                "id": f"host-{number}",
                "name": f"host {number}",
                "listen_port": port,
                "server_name": server_name.format(number),
                "locations": [{"path": "/", "proxy_pass": "http://127.0.0.1:9000"}],
            }
            for number in range(hosts)
        ],
    }


@asynccontextmanager
async def longest_stall() -> AsyncIterator[list[float]]:
    """How much processor time the event loop took in one turn, at most."""
    worst = [0.0]

    async def turn() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.005)
            worst[0] = max(worst[0], time.thread_time() - began)

    async with asyncio.TaskGroup() as tasks:
        turning = tasks.create_task(turn())
        await asyncio.sleep(0)
        try:
            yield worst
        finally:
            turning.cancel()


async def test_an_import_beyond_the_limit_is_refused_at_once_and_nobody_waits(tmp_path: Path) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        async with longest_stall() as stall:
            path = f"/workspaces/{workspace}/import?dry_run=true"
            faults = await api.admin.faults("POST", path, bundle(3000))
        assert faults == [("virtual_hosts", "TOO_MANY")]
        assert stall[0] < STALL_SECONDS


@pytest.mark.parametrize("server_name", ["host-{}.example.com", "same.example.com"])
async def test_a_full_workspace_is_judged_beside_the_event_loop(tmp_path: Path, server_name: str) -> None:
    async with rest_api(tmp_path) as api:
        _, workspace = await api.workspace()
        async with longest_stall() as stall:
            answer = await api.admin.call(
                "POST",
                f"/workspaces/{workspace}/import?dry_run=true",
                bundle(rules.HOSTS_PER_WORKSPACE, server_name=server_name),
            )
        if server_name == "same.example.com":
            assert answer.status_code == 422
            assert len(answer.json()["error"]["details"]) == 100, "and no more are told than anyone reads"
        else:
            assert (answer.status_code, answer.json()["created"]) == (200, rules.HOSTS_PER_WORKSPACE)
        assert stall[0] < STALL_SECONDS


def spec(name: str, port: int, *, tls: bool = False) -> VirtualHostSpec:
    return VirtualHostSpec(name=name, server_name=name, listen_port=port, ssl_enabled=tls)


def test_the_index_finds_what_comparing_all_pairs_finds() -> None:
    hosts = {
        str(number): spec(name, port, tls=tls)
        for number, (name, port, tls) in enumerate(
            (name, port, tls)
            for name in ("a.test", ".a.test", "*.a.test b.test", "b.test", "_")
            for port in (80, 443)
            for tls in (False, True)
        )
    }
    index = HostNeighbours(hosts)
    for identity, host in hosts.items():
        all_others = {name: other for name, other in hosts.items() if name != identity}
        found = [
            sorted(problem.message for problem in clashes.host_clashes(host, around(others)))
            for others in (all_others, index.of(identity, host))
        ]
        assert found[0] == found[1]


def around(hosts: dict[str, VirtualHostSpec]) -> WorkspaceSurroundings:
    return WorkspaceSurroundings(virtual_hosts=hosts, upstreams=(), certificates=(), agents={})
