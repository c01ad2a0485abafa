"""Two NGINX with their agents, and one virtual host on both: what `make run` shows of proxies.

python tools/demo_proxies.py READY_FILE PASSWORD_FILE STATE_DIR     until SIGTERM or SIGINT
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EMAIL = "admin@fleetplane.local"
PORTS = (8081, 8082)
STOP_SECONDS = 15.0


class Server:
    """What is needed of the server's REST interface."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._token = ""

    def call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._address}/v1{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def log_in(self, password: str) -> None:
        self._token = self.call("/auth/login", {"email": EMAIL, "password": password})["access_token"]

    def find_or_make(self, path: str, key: str, body: dict[str, Any]) -> str:
        for one in self.call(f"{path}?per_page=100")["data"]:
            if one[key] == body[key]:
                return str(one["id"])
        return str(self.call(path, body)["id"])

    def authority(self) -> bytes:
        with urllib.request.urlopen(f"{self._address}/.well-known/ca.pem", timeout=20) as answer:
            return bytes(answer.read())


def prepare(server: Server, password: str, states: Sequence[Path], backend: str) -> None:
    """The place, what is served there, and a token for each agent that has none yet."""
    server.log_in(password)
    organization = server.find_or_make("/organizations", "slug", {"name": "Demo", "slug": "demo"})
    workspaces = f"/organizations/{organization}/workspaces"
    workspace = server.find_or_make(workspaces, "slug", {"name": "Demo", "slug": "demo"})
    place = f"/workspaces/{workspace}"
    servers = {"servers": [{"address": backend}]}
    upstream = server.find_or_make(f"{place}/upstreams", "name", {"name": "backend", **servers})
    server.call(f"/upstreams/{upstream}", servers, "PATCH")  # the one of the last time had another port
    location = {"path": "/", "upstream_id": upstream}
    site = {"name": "Site", "server_name": "demo.localhost", "listen_port": 80, "locations": [location]}
    server.find_or_make(f"{place}/virtual-hosts", "name", site)
    for state in states:
        state.mkdir(parents=True, exist_ok=True)
        if not (state / "credential").exists():
            body = {"name": f"nginx-{state.name}", "labels": {"env": "demo"}}
            token = server.call(f"{place}/agents/tokens", body)["token"]
            (state / "token").touch(mode=0o600)
            (state / "token").write_text(token)


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The application behind NGINX."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        body = b"hello from behind NGINX\n"
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
    writer.close()


def free(port: int) -> int:
    """The port itself, or another one if it is taken."""
    for wanted in (port, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", wanted))
            return int(probe.getsockname()[1])
    return port


def commands(ready: Path, password: Path, folder: Path, backend: str) -> tuple[list[list[str]], list[int]]:
    """How to start each agent, and the port its NGINX will serve on."""
    said = json.loads(ready.read_text())["listeners"]
    states = [folder.absolute() / str(number) for number in range(len(PORTS))]
    server = Server(said["web"][0])
    prepare(server, password.read_text().strip(), states, backend)
    (folder / "ca.pem").write_bytes(server.authority())
    ports = [free(port) for port in PORTS]
    found = []
    for state, port in zip(states, ports, strict=True):
        command = [
            str(Path(sys.executable).with_name("fleetplane")), "agent", "proxy", "--managed",
            "--stop-nginx-on-exit", "--server", said["proxy-agents"][0].removeprefix("https://"),
            "--ca-file", str(folder / "ca.pem"), "--listen-address", "127.0.0.1", "--workers", "1",
            "--state-dir", str(state), "--map-port", f"80:{port}", "--log-level", "warning",
        ]  # fmt: skip
        known = (state / "credential").exists()
        found.append(command if known else [*command, "--token-file", str(state / "token")])
    return found, ports


async def run(ready: Path, password: Path, folder: Path) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    backend = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"127.0.0.1:{backend.sockets[0].getsockname()[1]}"
    starting, ports = await asyncio.to_thread(commands, ready, password, folder, address)
    agents = [await asyncio.create_subprocess_exec(*command) for command in starting]
    for port in ports:
        print(f"An NGINX serves here: curl -H 'Host: demo.localhost' http://127.0.0.1:{port}/", flush=True)
    await stop.wait()
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            agent.terminate()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await asyncio.gather(*(agent.wait() for agent in agents))
    backend.close()
    return 0


def main() -> int:
    if shutil.which("nginx") is None and not Path("/usr/sbin/nginx").exists():
        print("Install NGINX to see two proxies here too.", file=sys.stderr)
        return 0
    try:
        return asyncio.run(run(*map(Path, sys.argv[1:4])))
    except (OSError, urllib.error.URLError) as error:
        print(f"The demonstration of proxies could not be set up: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
