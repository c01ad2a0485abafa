"""The chain as an operator has it: our server, our agent and NGINX, each a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from support.proxies.nginx_rig import backend
from support.shared.free_ports import free_port
from support.shared.server_process import ServerProcess, running_server

from fleetplane.domains.proxies.agent.nginx.processes import find_master
from fleetplane.domains.proxies.nginx.site import Paths

EMAIL, PASSWORD = "admin@example.test", "correct horse battery staple"


class Operator:
    """Somebody with the server's REST interface."""

    def __init__(self, server: ServerProcess) -> None:
        self.http = httpx.Client(base_url=f"{server.web}/v1", timeout=60)
        tokens = self._answer(self.http.post("/auth/login", json={"email": EMAIL, "password": PASSWORD}))
        self.http.headers["authorization"] = f"Bearer {tokens['access_token']}"

    def _answer(self, response: httpx.Response) -> Any:
        assert response.is_success, f"{response.request.url}: {response.status_code} {response.text}"
        return response.json()

    def close(self) -> None:
        self.http.close()

    def get(self, path: str) -> Any:
        return self._answer(self.http.get(path))

    def post(self, path: str, **body: Any) -> Any:
        return self._answer(self.http.post(path, json=body) if body else self.http.post(path))

    def patch(self, path: str, **body: Any) -> Any:
        return self._answer(self.http.patch(path, json=body))


def operating(server: ServerProcess) -> contextlib.closing[Operator]:
    return contextlib.closing(Operator(server))


@contextlib.contextmanager
def agent_process(
    folder: Path, address: str, authority: Path, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    log = (folder / "agent.log").open("ab")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fleetplane.cli.main",
            "agent",
            "proxy",
            "--managed",
            "--server",
            address,
            "--ca-file",
            str(authority),
            "--state-dir",
            str(folder),
            "--listen-address",
            "127.0.0.1",
            "--label",
            "env=test",
            "--workers",
            "1",
            *arguments,
        ],
        stderr=log,
    )
    try:
        yield process
    finally:
        log.close()
        if process.poll() is None:
            process.terminate()
        process.wait(60)


async def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(0.05)


async def served(port: int) -> str:
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            answer = await client.get(f"http://127.0.0.1:{port}/", headers={"host": "app.test"})
        except httpx.TransportError:
            return ""
    return answer.text if answer.status_code == 200 else ""


async def until_served(port: int, text: str, *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while (found := await served(port)) != text:
        assert time.monotonic() < deadline, f"still {found!r} after {seconds} s"
        await asyncio.sleep(0.05)


def serving(folder: Path, options: list[str]) -> contextlib.AbstractContextManager[ServerProcess]:
    return running_server(folder, *options, admin_password=PASSWORD)


async def test_from_a_token_to_a_served_virtual_host_and_through_everybodys_restart(
    folder: Path, tmp_path: Path
) -> None:
    web, agents, port = free_port(), free_port(), free_port()
    options = [
        "--only",
        "proxies",
        "--set",
        f"listeners.web.addresses=127.0.0.1:{web}",
        "--set",
        f"listeners.proxy-agents.addresses=127.0.0.1:{agents}",
        "--set",
        f"proxies.admin_email={EMAIL}",
    ]
    authority = tmp_path / "ca.pem"
    address = f"localhost:{agents}"
    async with backend("one") as one, backend("two") as two:
        with serving(tmp_path / "server", options) as server, operating(server) as operator:
            authority.write_bytes(operator.http.get(f"{server.web}/.well-known/ca.pem").content)
            organization = operator.post("/organizations", name="Acme", slug="acme")["id"]
            workspace = operator.post(f"/organizations/{organization}/workspaces", name="W", slug="w")["id"]
            token = operator.post(f"/workspaces/{workspace}/agents/tokens", name="web-01")
            agent = token["agent_id"]
            with agent_process(folder, address, authority, "--token", token["token"]) as first:
                await until(lambda: operator.get(f"/agents/{agent}")["state"] == "online")
                shown = operator.get(f"/agents/{agent}")
                assert shown["labels"]["env"] == "test"
                assert "http2" in shown["capabilities"]

                upstream = operator.post(
                    f"/workspaces/{workspace}/upstreams", name="app", servers=[{"address": one.address}]
                )["id"]
                operator.post(
                    f"/workspaces/{workspace}/virtual-hosts",
                    name="App",
                    server_name="app.test",
                    listen_port=port,
                    locations=[{"path": "/", "upstream_id": upstream}],
                )
                await until_served(port, "one")
                assert operator.post(f"/agents/{agent}/reload")["message"] == "Nginx reloaded successfully"
                await until(lambda: operator.get(f"/agents/{agent}")["health"]["config_version"] > 0)
                assert operator.get(f"/agents/{agent}")["health"]["nginx_status"] == "running"

                first.send_signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait, 60)
            assert await served(port) == "one", "NGINX serves on without its agent"
        assert await served(port) == "one", "and without the server"

        master = find_master(Paths(state=folder).pid, Paths(state=folder).config)
        with agent_process(folder, address, authority, "--stop-nginx-on-exit") as second:
            with serving(tmp_path / "server", options) as server, operating(server) as operator:
                await until(lambda: operator.get(f"/agents/{agent}")["state"] == "online")
                operator.patch(f"/upstreams/{upstream}", servers=[{"address": two.address}])
                await until_served(port, "two")
                assert find_master(Paths(state=folder).pid, Paths(state=folder).config) == master
            second.terminate()
            assert await asyncio.to_thread(second.wait, 60) == 0
        assert await served(port) == ""
