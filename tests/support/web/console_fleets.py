"""Fleets of every domain around one server: two real NGINX, three edge daemons, a board and GPUs."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx
from support.edge.shipped_daemon import ShippedDaemon
from support.shared.cli_runner import COMMAND, spawn
from support.shared.free_ports import free_port
from support.shared.server_process import ServerProcess

from fleetplane.cli.demo import proxies

SECONDS = 60.0
START_SECONDS = 180.0
"""Of a process, on a machine that has much else to do."""
GPUS = 3
DAEMONS = ("build-1", "build-2", "build-3")
EDGE_TENANT = "lab"
BOARD = "attic"
PIN = f"{BOARD}.17"
WORKSPACE = "/tenants/demo/workspaces/demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    nginx: tuple[str, ...]
    """Where each NGINX serves."""


@contextmanager
def simulated_gpus(server: ServerProcess) -> Iterator[None]:
    agent = spawn("agent", "gpu", "--simulate", str(GPUS), "--address", server.socket)
    try:
        yield
    finally:
        agent.kill()
        agent.communicate(timeout=60)


@asynccontextmanager
async def demo_fleets(
    server: ServerProcess, folder: Path, token: str, password: str
) -> AsyncIterator[Fleets]:
    """All of them, set up and started; each shows up at the server when it is ready."""
    async with AsyncExitStack() as stack:
        headers = {"authorization": f"Bearer {token}"}
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=server.web, headers=headers, trust_env=False, timeout=SECONDS)
        )
        stack.enter_context(simulated_gpus(server))
        nginx = await stack.enter_async_context(_proxies(server, password))
        await stack.enter_async_context(_board(server, folder, http))
        for name in DAEMONS:
            await stack.enter_async_context(_daemon(server, http, name))
        yield Fleets(nginx=nginx)


@asynccontextmanager
async def _proxies(server: ServerProcess, password: str) -> AsyncIterator[tuple[str, ...]]:
    """As the demonstration starts them, on ports of their own."""
    ports = (free_port(), free_port())
    async with AsyncExitStack() as stack:
        # Agents have sockets there, whose paths must be short.
        place = Path(stack.enter_context(TemporaryDirectory(prefix="fp-")))
        backend = await stack.enter_async_context(await asyncio.start_server(proxies.answer, "127.0.0.1", 0))
        address = "{}:{}".format(*backend.sockets[0].getsockname()[:2])
        with patch.object(proxies, "PORTS", ports), patch.object(proxies, "CALL_SECONDS", SECONDS):
            starting, served = await asyncio.to_thread(
                proxies.commands, server.listeners, password, place, address
            )
        for command in starting:
            await stack.enter_async_context(_running(*command))
        yield tuple(f"http://127.0.0.1:{port}/" for port in served)


@asynccontextmanager
async def _running(*command: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[None]:
    """A command of ours, until it is asked to end."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *command,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def _board(server: ServerProcess, folder: Path, http: httpx.AsyncClient) -> AsyncIterator[None]:
    made = await http.post("/api/v1/join-tokens", json={"name": BOARD})
    made.raise_for_status()
    environment = {
        "FLEETPLANE_BOARD_AGENT_STATE_DIR": str(folder / "board"),
        "FLEETPLANE_BOARD_AGENT_NAME": BOARD,
    }
    address = server.address("boards", "https").removeprefix("https://")
    joined = await asyncio.to_thread(
        subprocess.run,
        [*COMMAND, "agent", "board", "join", "--replace", "--simulate", "--server", address, "-"],
        input=made.json()["token"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert joined.returncode == 0, joined.stderr
    run = ("agent", "board", "run", "--simulate", "--address", "127.0.0.1", "--port", "0")
    async with _running(*run, environment=environment):
        boards = (await http.get("/api/v1/nodes")).json()
        pin: dict[str, Any] = {"node_id": board_number(boards), "pin_number": 17, "direction": "output"}
        (await http.post("/api/v1/gpio", json={**pin, "name": "lamp"})).raise_for_status()
        yield


def board_number(boards: Any) -> int:
    listed = boards.get("data") or boards.get("nodes")
    return int(next(one["id"] for one in listed if one["name"] == BOARD))


@asynccontextmanager
async def _daemon(server: ServerProcess, http: httpx.AsyncClient, name: str) -> AsyncIterator[None]:
    made = await http.post(
        "/v1/edge/enrollment-tokens", json={"name": name}, headers={"x-aegis-tenant": EDGE_TENANT}
    )
    made.raise_for_status()
    address = server.address("edge", "http").removeprefix("http://")
    daemon = await ShippedDaemon.enroll(address, made.json()["token"], wait_scale=0.1)
    async with daemon.running():
        yield
