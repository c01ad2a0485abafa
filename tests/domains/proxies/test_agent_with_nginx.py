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
from support.shared.free_ports import free_port
from support.shared.server_process import ServerProcess, running_server

PASSWORD = "correct horse battery staple"
DEADLINE_SECONDS = 60.0

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs NGINX")


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.05)
    return found


class Fleet:
    """One workspace with one agent, as an operator sees it."""

    def __init__(self, server: ServerProcess, folder: Path, backend: str) -> None:
        self.backend = backend
        self.folder = folder
        self.log_in(server)
        organization = self.post("/organizations", {"name": "Acme", "slug": "acme"})["id"]
        path = f"/organizations/{organization}/workspaces"
        self.workspace = self.post(path, {"name": "Production", "slug": "production"})["id"]
        self.enrolled = self.post(f"/workspaces/{self.workspace}/agents/tokens", {"name": "web-01"})

    def log_in(self, server: ServerProcess) -> None:
        self.server = server
        self.web = httpx.Client(base_url=f"{server.web}/v1", timeout=60)
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        token = self.post("/auth/login", login, status=200)["access_token"]
        self.web.headers["Authorization"] = f"Bearer {token}"

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
            sys.executable,
            "-m",
            "fleetplane.cli.main",
            "agent",
            "proxy",
            "--server",
            address,
            "--ca-file",
            str(self.folder / "ca.pem"),
            "--token-file",
            str(self.folder / "token"),
            "--state-dir",
            str(self.folder / "state"),
            "--managed",
            "--stop-nginx-on-exit",
            "--listen-address",
            "127.0.0.1",
        ]
        with (self.folder / "agent.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


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
    port = free_port()
    with (
        running_server(tmp_path / "server", "--only", "proxies", admin_password=PASSWORD) as server,
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

            squatter.bind(("127.0.0.1", free_port()))
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


def test_a_host_whose_port_is_taken_is_set_aside_told_everywhere_and_comes_on_request(tmp_path: Path) -> None:
    port = free_port()
    with (
        running_server(tmp_path / "server", "--only", "proxies", admin_password=PASSWORD) as server,
        socket.socket() as squatter,
        backend() as address,
    ):
        squatter.bind(("127.0.0.1", free_port()))
        squatter.listen()
        taken = squatter.getsockname()[1]
        fleet = Fleet(server, tmp_path, address)
        fleet.host("late.example", taken)
        fleet.host("good.example", port)
        with contextlib.closing(fleet.web), fleet.running_agent():
            until(lambda: served(port, "good.example") == "hello")
            agent_id = fleet.enrolled["agent_id"]
            # A report that it is in service may come before the word that says what of it is not.
            done = until(
                lambda: (
                    (one := fleet.deployment(3)) and one["state"] == "success" and "set_aside" in one and one
                )
            )
            (part,) = done["set_aside"]
            assert "bind()" in done["set_aside"][part]
            host = fleet.web.get(f"/virtual-hosts/{part.removeprefix('virtual_host/')}").json()
            assert (host["server_name"], host["set_aside"][0]["agent_id"]) == ("late.example", agent_id)
            told = f"alert set_aside:{part}: "
            until(lambda: any(one.startswith(told) for one in fleet.agent().get("reasons", ())))
            assert fleet.agent()["state"] == "degraded"
            explained = fleet.web.get(f"/agents/{agent_id}/explain").json()
            assert [one["code"] for one in explained["findings"]] in (["SET_ASIDE"], ["APPLYING"], ["SENT"])

            def rows() -> list[tuple[bool, list[str]]]:
                found = fleet.web.get(f"/workspaces/{fleet.workspace}/configs/3/agents").json()["data"]
                return [(row["in_service"], list(row.get("set_aside", ()))) for row in found]

            until(lambda: rows() == [(True, [part])])

            squatter.close()
            until(lambda: fleet.deployment(3)["state"] == "success")
            fleet.post(f"/agents/{agent_id}/retry", status=200)
            until(lambda: served(taken, "late.example") == "hello")
            until(lambda: "set_aside" not in fleet.deployment(3))
            until(lambda: not any("set_aside" in one for one in fleet.agent().get("reasons", [])))
            kinds = [one["type"] for one in fleet.web.get(f"/agents/{agent_id}/events").json()["data"]]
            assert "agent.started" in kinds


def fleetplane(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleetplane.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_after_a_backup_was_restored_agents_are_brought_to_what_it_says(tmp_path: Path) -> None:
    port, lost_port, agents_port = free_port(), free_port(), free_port()
    data, copy = tmp_path / "server", tmp_path / "copy.tar"
    options = ("--only", "proxies", "--set", f"listeners.proxy-agents.addresses=127.0.0.1:{agents_port}")
    with backend() as address:
        with running_server(data, *options, admin_password=PASSWORD) as server:
            fleet = Fleet(server, tmp_path, address)
            with contextlib.closing(fleet.web), fleet.running_agent():
                fleet.host("kept.example", port)
                until(lambda: (one := fleet.deployment(2)) and one["state"] == "success")
                fleetplane("backup", copy, "--data-dir", data)
                for name in ("lost.example", "lost-too.example"):
                    fleet.host(name, lost_port)
                until(lambda: served(lost_port, "lost.example") == "hello")
                until(lambda: (fleet.agent()["health"] or {}).get("config_version") == 4)
            server.stop()
        fleetplane("restore", copy, "--data-dir", data, "--replace")
        with running_server(data, *options, admin_password=PASSWORD) as server:
            fleet.log_in(server)
            with contextlib.closing(fleet.web), fleet.running_agent():
                until(lambda: (fleet.agent()["health"] or {}).get("config_version") == 5)
                assert (served(port, "kept.example"), served(lost_port, "lost.example")) == ("hello", None)
                versions = fleet.web.get(f"/workspaces/{fleet.workspace}/configs").json()["data"]
                assert (versions[0]["version"], versions[0]["cause"]) == (5, "agent.ahead")
                fleet.host("next.example", lost_port)
                until(lambda: served(lost_port, "next.example") == "hello")
                assert fleet.deployment(6) is not None
