"""The whole road: REST, the server, the product's own agent, a real NGINX, and back."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, running_server

PASSWORD = "correct horse battery staple"
DEADLINE_SECONDS = 40.0

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs NGINX")


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Fleet:
    """One workspace with one agent, as an operator sees it."""

    def __init__(self, server: ServerProcess, folder: Path, backend: str) -> None:
        self.backend = backend
        self.server = server
        self.folder = folder
        self.web = httpx.Client(base_url=f"{server.web}/v1", timeout=30)
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        token = self.post("/auth/login", login, status=200)["access_token"]
        self.web.headers["Authorization"] = f"Bearer {token}"
        organization = self.post("/organizations", {"name": "Acme", "slug": "acme"})["id"]
        path = f"/organizations/{organization}/workspaces"
        self.workspace = self.post(path, {"name": "Production", "slug": "production"})["id"]
        self.enrolled = self.post(f"/workspaces/{self.workspace}/agents/tokens", {"name": "web-01"})

    def post(self, path: str, body: dict[str, Any] | None = None, *, status: int = 201) -> Any:
        answer = self.web.post(path, json=body) if body is not None else self.web.post(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def agent(self) -> Any:
        return self.web.get(f"/agents/{self.enrolled['agent_id']}").json()

    def deployment(self, version: int) -> Any:
        found = self.web.get(f"/agents/{self.enrolled['agent_id']}/configs").json()["data"]
        return next((one for one in found if one["version"] == version), None)

    def host(self, name: str, port: int) -> None:
        locations = [{"path": "/", "proxy_pass": self.backend}]
        body = {"name": name, "server_name": name, "listen_port": port, "locations": locations}
        self.post(f"/workspaces/{self.workspace}/virtual-hosts", body)

    @contextlib.contextmanager
    def running_agent(self) -> Iterator[subprocess.Popen[bytes]]:
        (self.folder / "ca.pem").write_bytes(httpx.get(f"{self.server.web}/.well-known/ca.pem").content)
        (self.folder / "token").write_text(self.enrolled["token"])
        address = self.server.address("proxy-agents", "https://").removeprefix("https://")
        command = [
            sys.executable, "-m", "fleetplane.cli.main", "agent", "proxy", "--server", address,
            "--ca-file", str(self.folder / "ca.pem"), "--token-file", str(self.folder / "token"),
            "--state-dir", str(self.folder / "state"), "--managed", "--stop-nginx-on-exit",
            "--listen-address", "127.0.0.1",
        ]  # fmt: skip
        with (self.folder / "agent.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


class Greeter(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def backend() -> Iterator[str]:
    """What the hosts pass requests on to; files would have to be readable for NGINX's own user."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Greeter) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def served(port: int, name: str) -> str | None:
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.get(f"http://127.0.0.1:{port}/", headers={"host": name})
        return answer.text if answer.status_code == 200 else None
    return None


def test_a_host_is_served_a_reload_done_and_a_conflict_rolled_back(tmp_path: Path) -> None:
    password = ("--set", f"proxies.admin_password={PASSWORD}", "--only", "proxies")
    port = free_port()
    with (
        running_server(tmp_path / "server", *password) as server,
        socket.socket() as squatter,
        backend() as address,
    ):
        fleet = Fleet(server, tmp_path, address)
        with contextlib.closing(fleet.web), fleet.running_agent():
            fleet.host("good.example", port)
            until(lambda: served(port, "good.example") == "hello")
            until(lambda: (one := fleet.deployment(2)) and one["state"] == "success")
            until(lambda: (found := fleet.agent())["health"] and found["health"]["config_version"] == 2)
            # A machine that is busy with other tests is rightly called degraded: for its CPU, not for this.
            assert fleet.agent()["state"] in ("online", "degraded")
            assert fleet.agent()["health"]["nginx_status"] == "running"
            done = fleet.post(f"/agents/{fleet.enrolled['agent_id']}/reload", status=200)
            assert (done["success"], done["message"]) == (True, "Nginx reloaded successfully")

            squatter.bind(("127.0.0.1", 0))
            squatter.listen()
            fleet.host("bad.example", squatter.getsockname()[1])
            refused = until(lambda: (one := fleet.deployment(3)) and one["error"] and one)
            assert refused["state"] in ("rolled_back", "failed")
            assert "bind()" in refused["error"]
            until(lambda: fleet.agent()["state"] == "degraded")
            assert fleet.agent()["health"]["config_version"] == 2
            assert served(port, "good.example") == "hello", "what was good is served on"
            asked = f"/workspaces/{fleet.workspace}/error-logs?level=emerg&source=nginx_error"
            complaint = until(lambda: fleet.web.get(asked).json()["data"])[-1]
            assert (complaint["level"], complaint["agent_id"]) == ("emerg", fleet.enrolled["agent_id"])
            assert "bind()" in complaint["message"], "NGINX's own words reach whoever asks"
        assert [line for line in server.logged() if line.get("level") == "error"] == []
