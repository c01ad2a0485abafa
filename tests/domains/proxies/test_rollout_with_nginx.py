"""Rollouts of a workspace's configuration on three real NGINX, while requests flow."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.proxies import brisk_agent
from support.shared.cli_runner import Outcome
from support.shared.free_ports import free_port
from support.shared.server_process import ServerProcess, running_server

from fleetplane.cli.main import run

PASSWORD = "correct horse battery staple"
PATIENCE = "proxies.critical_after_seconds=3600"
"""A busy machine is no failure of a version."""
DEADLINE_SECONDS = 180.0
NAMES = ("web-1", "web-2", "web-3")

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs NGINX")


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.25)
    return found


class Backend(BaseHTTPRequestHandler):
    """Answers `/good` and `/better` with their names, and anything else with an error."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.send_response(200 if name in ("good", "better") else 500)
        self.send_header("content-length", str(len(name)))
        self.end_headers()
        self.wfile.write(name.encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def backend() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Backend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Visitors:
    """Ask each NGINX again and again, and count what each answers."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports
        self._stop = threading.Event()
        self.answers: dict[str, Counter[str]] = {name: Counter() for name in ports}

    def ask(self, name: str) -> str:
        connection = HTTPConnection("127.0.0.1", self._ports[name], timeout=60)
        try:
            connection.request("GET", "/", headers={"host": "a.test"})
            answer = connection.getresponse()
            words = answer.read(10).decode()
            return f"{answer.status} {words}" if answer.status == 200 else "5xx"
        except (OSError, HTTPException):
            return "nobody"
        finally:
            connection.close()

    def _visit(self) -> None:
        while not self._stop.wait(0.05):
            for name in self._ports:
                self.answers[name][self.ask(name)] += 1

    @contextmanager
    def visiting(self) -> Iterator[None]:
        thread = threading.Thread(target=self._visit)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()


class Fleet:
    """A workspace with three agents, as its operator and the server's owner see it."""

    def __init__(self, server: ServerProcess, folder: Path, backend: str) -> None:
        self.server, self.folder, self.backend = server, folder, backend
        self.port = free_port()
        self.ports = {name: free_port() for name in NAMES}
        self.web = httpx.Client(base_url=f"{server.web}/v1", timeout=60)
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        token = self.call("POST", "/auth/login", login)["access_token"]
        self.web.headers["Authorization"] = f"Bearer {token}"
        organization = self.call("POST", "/organizations", {"name": "Acme", "slug": "acme"})["id"]
        path = f"/organizations/{organization}/workspaces"
        self.workspace = self.call("POST", path, {"name": "Production", "slug": "production"})["id"]
        self.tokens = {
            name: self.call("POST", f"/workspaces/{self.workspace}/agents/tokens", {"name": name})
            for name in NAMES
        }
        locations = [{"path": "/", "proxy_pass": f"{backend}/good"}]
        body = {"name": "a", "server_name": "a.test", "listen_port": self.port, "locations": locations}
        self.host = self.call("POST", f"/workspaces/{self.workspace}/virtual-hosts", body)["id"]

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.web.request(method, path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def serve(self, what: str) -> None:
        locations = [{"path": "/", "proxy_pass": f"{self.backend}/{what}"}]
        self.call("PATCH", f"/virtual-hosts/{self.host}", {"locations": locations})

    def run(self, *words: str) -> Outcome:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = run([*words, "--data-dir", str(self.server.log.parent)])
        return Outcome(code=code, out=out.getvalue(), err=err.getvalue())

    def rollouts(self) -> list[dict[str, Any]]:
        found = self.run("rollout", "status", "-o", "json")
        assert found.code == 0, found.err
        return json.loads(found.out)  # type: ignore[no-any-return]

    @contextmanager
    def agent(self, name: str) -> Iterator[None]:
        place = self.folder / name
        place.mkdir()
        (place / "ca.pem").write_bytes(httpx.get(f"{self.server.web}/.well-known/ca.pem").content)
        (place / "token").write_text(self.tokens[name]["token"])
        address = self.server.address("proxy-agents", "https://").removeprefix("https://")
        command = [sys.executable, brisk_agent.__file__, address, str(place), str(self.port)]
        with (place / "agent.log").open("wb") as log:
            process = subprocess.Popen([*command, str(self.ports[name])], stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o755)
    with ExitStack() as stack:
        address = stack.enter_context(backend())
        server = stack.enter_context(running_server(folder / "s", "--set", PATIENCE, admin_password=PASSWORD))
        fleet = Fleet(server, folder, address)
        stack.callback(fleet.web.close)
        for name in NAMES:
            stack.enter_context(fleet.agent(name))
        yield fleet


POLICY = """\
waves: [1, rest]
soak_seconds: 6
max_soak_seconds: 600
confirm_seconds: 600
on_halt: roll_back
gates:
  - {name: errors, query: error_rate, max: 0.05, max_increase: 0.05, window_seconds: 60, halts: true}
"""


def test_a_canary_that_raises_errors_is_rolled_back_and_nobody_else_ever_has_it(fleet: Fleet) -> None:
    visitors = Visitors(fleet.ports)
    until(lambda: all(visitors.ask(name) == "200 good" for name in NAMES))
    policy = fleet.folder / "policy.yaml"
    policy.write_text(POLICY)
    made = fleet.run("rollout", "policy", "set", "proxies.config", fleet.workspace, "--policy", str(policy))
    assert made.code == 0, made.err
    canary = fleet.tokens["web-1"]["agent_id"]
    with visitors.visiting():
        until(lambda: fleet.call("GET", f"/agents/{canary}/metrics")["requests_total"] > 5)
        fleet.serve("bad")
        (rollout,) = until(fleet.rollouts)
        assert rollout["automatic"]
        until(lambda: fleet.rollouts()[0]["phase"] == "rolled_back")
        until(lambda: visitors.ask("web-1") == "200 good")
        found = json.loads(fleet.run("rollout", "status", rollout["id"], "-o", "json").out)
        assert {one["name"]: one["state"] for one in found["targets"]} == {
            "web-1": "rolled_back",
            "web-2": "never_started",
            "web-3": "never_started",
        }
        assert found["halt"][0]["code"] == "GATE"
        assert "error_rate is" in found["halt"][0]["message"]
        watched = fleet.run("rollout", "watch", rollout["id"])
        assert watched.code == 3, "it is over, and not done"

        fleet.serve("better")
        until(lambda: fleet.rollouts()[0]["phase"] == "done")
        until(lambda: all(visitors.ask(name) == "200 better" for name in NAMES))
        second = fleet.rollouts()[0]
        assert second["counts"] == {"confirmed": 3}
        assert fleet.run("rollout", "watch", second["id"]).code == 0
    answers = visitors.answers
    assert answers["web-1"]["5xx"] > 0
    assert answers["web-2"]["5xx"] == answers["web-3"]["5xx"] == 0, "only the canary ever had it"
    assert not any(count["nobody"] for count in answers.values()), "every request was answered"

    undone = fleet.run("rollout", "undo", second["id"], "--reason", "we liked the old one better")
    assert undone.code == 0, undone.err
    until(lambda: fleet.rollouts()[0]["phase"] == "rolled_back")
    until(lambda: all(visitors.ask(name) == "200 good" for name in NAMES))
    assert fleet.run("rollout", "policy", "remove", "proxies.config", "nowhere").code == 4
