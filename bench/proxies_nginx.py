"""Real agents with real NGINX: from a PATCH to confirmed on all of them, and shipping the access log.

The server and the agents are processes as a user starts them, each agent with an NGINX of its own
under its state directory; everything shares the machine's cores, so that with many agents the
figure is the machine's rather than the product's. Confirmed means that the server has heard
that the new version serves: NGINX answered with it for half a second without a break. The pause for
further changes, half a second too, is part of the figure.

The access log is written beforehand and the agent started after it, so that it has all of it to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench import servers
from bench.figures import Effort, Row, alone
from bench.proxies_rollout import PASSWORD, _post, _workspace
from fleetplane.domains.proxies.nginx.site import Paths
from fleetplane.domains.proxies.nginx.typed.upkeep import LOG_FIELDS

FLEETS = (1, 10, 50)
CONFIRMED_WITHIN_SECONDS = {1: 3.0, 10: 6.0, 50: 30.0}
LINES = 200_000
LEAST_LINES_PER_SECOND = 10_000.0
FIRST_PORT = 21_000
DEADLINE_SECONDS = 300.0


@contextlib.contextmanager
def _agent(
    state: Path, server: str, authority: Path, token: str, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        str(Path(sys.executable).with_name("fleetplane")),
        "agent",
        "proxy",
        "--managed",
        "--stop-nginx-on-exit",
        "--server",
        server,
        "--ca-file",
        str(authority),
        "--token",
        token,
        "--state-dir",
        str(state),
        "--listen-address",
        "127.0.0.1",
        "--map-port",
        f"80:{port}",
        "--workers",
        "1",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def _states() -> Iterator[Path]:
    """Short paths, since they hold sockets, that NGINX's workers may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="fpb-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _until(condition: Callable[..., Awaitable[object]], *facts: Any, pause: float = 0.02) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition(*facts):  # noqa: ASYNC110  # nobody announces it
            await asyncio.sleep(pause)


class Fleet:
    """One virtual host, served by more and more agents."""

    def __init__(
        self, web: httpx.AsyncClient, workspace: str, said: dict[str, list[str]], states: Path
    ) -> None:
        self._web, self._workspace, self._states = web, workspace, states
        self._address = said["proxy-agents"][0].removeprefix("https://")
        self._authority = states / "ca.pem"
        self._web_address = said["web"][0]
        self._agents: list[str] = []
        self._host = ""
        self._changes = 0

    async def begin(self) -> None:
        answer = await self._web.get(f"{self._web_address}/.well-known/ca.pem")
        self._authority.write_bytes(answer.content)
        path = f"/workspaces/{self._workspace}/virtual-hosts"
        body = {"name": "h", "server_name": "h.test", "listen_port": 80, "locations": [self._location()]}
        self._host = (await _post(self._web, path, body))["id"]

    def _location(self) -> dict[str, Any]:
        self._changes += 1
        return {"path": "/", "root": "/srv/www/x", "custom_directives": {"return": f"200 {self._changes}"}}

    async def grow(self, count: int, running: contextlib.ExitStack) -> None:
        while (number := len(self._agents)) < count:
            path = f"/workspaces/{self._workspace}/agents/tokens"
            token = await _post(self._web, path, {"name": f"a{number}"})
            state, port = self._states / str(number), FIRST_PORT + number
            running.enter_context(_agent(state, self._address, self._authority, token["token"], port))
            self._agents.append(token["agent_id"])
        await _until(self._served, await self._newest())

    async def change(self) -> float:
        """Seconds from a PATCH until every agent has told that it serves what was asked for."""
        begun = time.perf_counter()
        body = {"locations": [self._location()]}
        (await self._web.patch(f"/virtual-hosts/{self._host}", json=body)).raise_for_status()
        await _until(self._served, await self._newest())
        return time.perf_counter() - begun

    async def _newest(self) -> int:
        answer = (await self._web.get(f"/workspaces/{self._workspace}/configs")).json()
        return max(int(one["version"]) for one in answer["data"])

    async def _served(self, version: int) -> bool:
        for agent in self._agents:
            health = (await self._web.get(f"/agents/{agent}")).json()["health"]
            if health is None or health["config_version"] < version:
                return False
        return True


async def _rollouts(said: dict[str, list[str]], fleets: Sequence[int], rounds: int) -> dict[int, list[float]]:
    async with _workspace(said["web"][0]) as (web, workspace):
        with _states() as states, contextlib.ExitStack() as running:
            fleet = Fleet(web, workspace, said, states)
            await fleet.begin()
            took = {}
            for count in fleets:
                await fleet.grow(count, running)
                took[count] = [await fleet.change() for _ in range(rounds)]
            return took


def _line(number: int) -> bytes:
    values = dict.fromkeys(LOG_FIELDS, f"{number}")
    values |= {
        "time": "1794783182.314",
        "remote_addr": "192.0.2.17",
        "method": "GET",
        "protocol": "HTTP/1.1",
        "uri": f"/api/v1/things/{number}?page=2",
        "status": "200",
        "host": "api.example.com",
        "referer": "",
        "user_agent": "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
        "request_id": f"{number:032x}",
        "virtual_host_id": "880e8400-e29b-41d4-a716-446655440004",
    }
    return json.dumps(values, separators=(",", ":")).encode()


async def _shipping(said: dict[str, list[str]], lines: int) -> tuple[float, float]:
    """Lines a second, and the agent's CPU seconds for them."""
    address = said["proxy-agents"][0].removeprefix("https://")
    async with _workspace(said["web"][0]) as (web, workspace):
        with _states() as states:
            authority, paths = states / "ca.pem", Paths(state=states / "s")
            authority.write_bytes((await web.get(f"{said['web'][0]}/.well-known/ca.pem")).content)
            paths.logs.mkdir(parents=True)
            paths.access_log.write_bytes(b"".join(_line(number) + b"\n" for number in range(lines)))
            size, position = paths.access_log.stat().st_size, paths.state / "access.position"
            token = await _post(web, f"/workspaces/{workspace}/agents/tokens", {"name": "shipper"})
            with _agent(paths.state, address, authority, token["token"], FIRST_PORT) as process:

                async def offset() -> int:
                    try:
                        stored = json.loads(position.read_bytes())
                    except FileNotFoundError:
                        return 0
                    return max((one["offset"] for one in stored["position"]["segments"]), default=0)

                await _until(offset)
                begun, before, used = time.perf_counter(), await offset(), _cpu_seconds(process.pid)

                async def done() -> bool:
                    return await offset() >= size

                await _until(done, pause=0.05)
                seconds = time.perf_counter() - begun
                share = 1 - before / size
                return lines * share / seconds, _cpu_seconds(process.pid) - used


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _server() -> Iterator[dict[str, list[str]]]:
    with servers.scratch() as directory:
        ready = directory / "proxies.ready"
        password = servers.secret_file(directory / "password", PASSWORD)
        command = [
            str(Path(sys.executable).with_name("fleetplane")),
            "server",
            "--only",
            "proxies",
            "--data-dir",
            str(directory / "data"),
            "--ready-file",
            str(ready),
            "--log-level",
            "error",
            "--set",
            "listeners.web.addresses=127.0.0.1:0",
            "--set",
            "listeners.proxy-agents.addresses=127.0.0.1:0",
            "--set",
            f"proxies.admin_password_file={password}",
            "--set",
            "proxies.requests_per_minute=1000000",
        ]
        with servers._running("fleetplane", command, ready, None):
            yield json.loads(ready.read_text())["listeners"]


def measure(effort: Effort) -> Sequence[Row]:
    quick = effort.gpus is not None
    fleets, rounds, lines = ((1, 2), 1, 2_000) if quick else (FLEETS, 3, LINES)
    with _server() as said:
        took = asyncio.run(_rollouts(said, fleets, rounds))
    with _server() as said:
        rate, cpu = asyncio.run(_shipping(said, lines))
    rows = []
    for count, seconds in took.items():
        bound = CONFIRMED_WITHIN_SECONDS.get(count, 30.0)
        rows.append(
            Row(
                figure=f"From PATCH to confirmed on {count} real NGINX",
                ours=f"{min(seconds):.2f} s",
                reference="",
                ratio=None,
                must_reach=f"under {bound:g} s",
                reached=min(seconds) < bound,
                note=f"rounds: {', '.join(f'{one:.2f} s' for one in seconds)}",
            )
        )
    rows.append(
        Row(
            figure="Access log shipped by one agent",
            ours=f"{rate:,.0f} lines/s",
            reference="",
            ratio=None,
            must_reach=f"{LEAST_LINES_PER_SECOND:,.0f} lines/s",
            reached=rate >= LEAST_LINES_PER_SECOND,
            note=f"{lines:,} lines; the agent used {cpu:.2f} s of a core for them, "
            f"{cpu / lines * 1e6:.0f} µs a line",
        )
    )
    return rows


if __name__ == "__main__":
    alone(measure, __doc__)
