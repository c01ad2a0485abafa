"""Two NGINX with their agents, and one virtual host on both: what the demonstration shows of proxies."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx

EMAIL = "admin@fleetplane.local"
PORTS = (8081, 8082)
CALL_SECONDS = 20.0


class DemoServer:
    """What is needed of the server's REST interface; a context manager."""

    def __init__(self, address: str) -> None:
        self._http = httpx.Client(base_url=address, timeout=CALL_SECONDS, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def call(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        """The content of an answer; raises `httpx.HTTPError`."""
        answer = self._http.request(method or ("GET" if body is None else "POST"), f"/v1{path}", json=body)
        answer.raise_for_status()
        return answer.json()

    def log_in(self, password: str) -> None:
        """Act as the administrator from now on."""
        token = self.call("/auth/login", {"email": EMAIL, "password": password})["access_token"]
        self._http.headers["authorization"] = f"Bearer {token}"

    def find_or_make(self, path: str, key: str, body: dict[str, Any]) -> str:
        """The id of what has that key, which is made if it is not there."""
        for one in self.call(f"{path}?per_page=100")["data"]:
            if one[key] == body[key]:
                return str(one["id"])
        return str(self.call(path, body)["id"])

    def authority(self) -> bytes:
        """What agents verify the server against, in PEM."""
        return self._http.get("/.well-known/ca.pem").raise_for_status().content


def prepare(server: DemoServer, password: str, states: Sequence[Path], backend: str) -> None:
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


def has_nginx() -> bool:
    """Whether there is an NGINX to run here."""
    return shutil.which("nginx") is not None or Path("/usr/sbin/nginx").exists()


def commands(
    listeners: Mapping[str, Sequence[str]], password: str, folder: Path, backend: str
) -> tuple[list[list[str]], list[int]]:
    """What `fleetplane` is given to start each agent, and the port its NGINX will serve on."""
    states = [folder.absolute() / str(number) for number in range(len(PORTS))]
    with DemoServer(listeners["web"][0]) as server:
        prepare(server, password, states, backend)
        (folder / "ca.pem").write_bytes(server.authority())
    ports = [free(port) for port in PORTS]
    found = []
    for state, port in zip(states, ports, strict=True):
        command = [
            "agent",
            "proxy",
            "--managed",
            "--stop-nginx-on-exit",
            "--server",
            listeners["proxy-agents"][0].removeprefix("https://"),
            "--ca-file",
            str(folder / "ca.pem"),
            "--listen-address",
            "127.0.0.1",
            "--workers",
            "1",
            "--state-dir",
            str(state),
            "--map-port",
            f"80:{port}",
            "--log-level",
            "warning",
        ]
        known = (state / "credential").exists()
        found.append(command if known else [*command, "--token-file", str(state / "token")])
    return found, ports
