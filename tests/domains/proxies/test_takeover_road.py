"""The whole road of a take-over: REST, CLI, server, an agent process, and an NGINX that was there before."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from support.proxies.found_nginx import FoundNginx, found_nginx
from support.proxies.nginx_rig import paths_in, stop_nginx
from support.shared.server_process import ServerProcess, running_server
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.cli.main import fleetplane

PASSWORD = "correct horse battery staple"
PATIENCE = "proxies.critical_after_seconds=3600"
"""A machine that is busy with other tests degrades no agent."""
DEADLINE_SECONDS = 60.0


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.05)
    return found


class Site:
    """A server, an NGINX that was found, and the agent beside it."""

    def __init__(self, server: ServerProcess, found: FoundNginx, folder: Path) -> None:
        self.server, self.found, self.folder = server, found, folder
        self.web = httpx.Client(base_url=f"{server.web}/v1", timeout=150)
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        token = self.post("/auth/login", login, status=200)["access_token"]
        self.web.headers["Authorization"] = f"Bearer {token}"
        (folder / "login").write_text(token)
        organization = self.post("/organizations", {"name": "Acme", "slug": "acme"})["id"]
        place = f"/organizations/{organization}/workspaces"
        self.workspace = self.post(place, {"name": "Production", "slug": "production"})["id"]
        self.enrolled = self.post(f"/workspaces/{self.workspace}/agents/tokens", {"name": "web-01"})
        self.resource = f"{server.web}/apis/v1/proxy-agents/web-01"
        self.agent_path = f"/agents/{self.enrolled['agent_id']}"

    def post(self, path: str, body: dict[str, Any] | None = None, *, status: int = 201) -> Any:
        answer = self.web.post(path, json=body) if body is not None else self.web.post(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def agent(self) -> Any:
        return self.web.get(self.agent_path).json()

    def cli(self, *arguments: str) -> str:
        where = ["--server", self.server.web, "--token-file", str(self.folder / "login")]
        done = CliRunner().invoke(fleetplane, ["proxies", *arguments, *where, "--workspace", self.workspace])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def act(self, action: str, body: dict[str, Any] | None = None) -> None:
        """By the resource API."""
        answer = self.web.post(f"{self.resource}/actions/{action}", json=body or {})
        assert answer.status_code == 200, answer.text

    def status(self) -> Any:
        return self.web.get(self.resource).json()["status"]

    def says(self) -> str:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{self.found.port}/", headers={"host": "a.test"}).text
        return ""

    @contextlib.contextmanager
    def running_agent(self, state: Path) -> Iterator[None]:
        (self.folder / "ca.pem").write_bytes(httpx.get(f"{self.server.web}/.well-known/ca.pem").content)
        (self.folder / "token").write_text(self.enrolled["token"])
        address = self.server.address("proxy-agents", "https://").removeprefix("https://")
        command = [sys.executable, "-m", "fleetplane.cli.main", "agent", "proxy", "--server", address]
        command += ["--ca-file", str(self.folder / "ca.pem"), "--token-file", str(self.folder / "token")]
        command += ["--state-dir", str(state), "--listen-address", "127.0.0.1", "--log-format", "json"]
        command += ["--observed-keys", "--observe", "--observed-config", str(self.found.config)]
        with (self.folder / "agent.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, state = tmp_path_factory.mktemp("takeover"), Path(tempfile.mkdtemp(prefix="fp-"))
    try:
        with (
            running_server(
                folder / "d", "--only", "proxies", "--set", PATIENCE, admin_password=PASSWORD
            ) as server,
            found_nginx() as found,
        ):
            site = Site(server, found, folder)
            with contextlib.closing(site.web), site.running_agent(state):
                yield site
    finally:
        stop_nginx(paths_in(state))
        shutil.rmtree(state, ignore_errors=True)
        shutil.rmtree(state.with_name(f"{state.name}-work"), ignore_errors=True)


def test_what_runs_is_seen_taken_over_and_given_back(site: Site) -> None:
    found, before, title = site.found, site.found.texts(), site.found.title()
    seen = until(lambda: site.agent().get("observed"))
    assert (seen["state"], seen["listening"], seen["workers"]) == (
        "observing",
        [f"127.0.0.1:{found.port}"],
        1,
    )
    assert site.agent()["state"] == "online"
    shown = site.web.get(f"{site.agent_path}/observed").json()
    assert {one["path"]: one["text"].encode() for one in shown["files"]} == before
    assert site.cli("observed", "web-01", "--file", str(found.config)).encode() == before[str(found.config)]
    assert site.says() == "found"
    log = str(found.folder / "logs" / "access.log")

    def logged() -> str:
        return "".join(site.web.get(f"{site.agent_path}/observed/log", params={"name": log}).json()["lines"])

    until(lambda: '"GET / HTTP/1.1" 200' in logged())  # NGINX writes it after its answer
    refused = site.web.get(f"{site.agent_path}/observed/log", params={"name": "/etc/shadow"})
    assert refused.status_code == 422
    assert site.post(f"{site.agent_path}/restart", {}, status=200)["success"] is False

    # Nothing to serve, no plan; and no version is sent to an agent that looks on.
    assert site.web.get(f"{site.agent_path}/takeover").status_code == 409
    certificate, key = ThrowawayCa().server(site.folder)
    secure = found.folder / "sites" / "secure.conf"
    text = f"listen 127.0.0.1:8443 ssl; server_name secure.test; ssl_certificate {certificate}; return 204;"
    secure.write_text(f"server {{ {text} ssl_certificate_key {key}; }}")
    here = ("import", "--agent", "web-01", "--address", "127.0.0.1")
    told = json.loads(site.cli(*here, "--apply", "--send-keys", "-o", "json"))
    secure.unlink()
    assert {"return 200 found": "understood", "stub_status": "refused"}.items() <= {
        one["text"]: one["outcome"] for one in told
    }.items()
    (brought,) = site.web.get(f"/workspaces/{site.workspace}/certificates").json()["data"]
    imported = site.web.get(f"/workspaces/{site.workspace}/virtual-hosts").json()["data"]
    assert {(one["server_name"], one["listen_port"], one["ssl_certificate_id"]) for one in imported} == {
        ("a.test", found.port, None),
        ("secure.test", 8443, brought["id"]),
    }
    for one in imported:
        site.web.delete(f"/virtual-hosts/{one['id']}").raise_for_status()
    host = {"name": "a", "server_name": "a.test", "listen_port": found.port}
    host["locations"] = [{"path": "/", "respond": {"status": 200, "body": "ours"}}]
    site.post(f"/workspaces/{site.workspace}/virtual-hosts", host)
    plan = site.web.get(f"{site.agent_path}/takeover").json()
    assert (plan["ports_kept"], plan["ports_added"], plan["ports_lost"]) == ([found.port], [], [])
    assert (plan["valid"], plan["hosts"][0]["server_name"]) == (True, "a.test")
    text = site.cli("rendered", "web-01", str(plan["version"]), "--against", str(plan["version"] - 1))
    assert '+        return 200 "ours";' in text or "+        return 200 ours;" in text, text
    stale = site.web.post(f"{site.agent_path}/takeover", json={"plan": "0" * 32})
    assert stale.status_code == 409
    assert (site.says(), site.web.get(f"{site.agent_path}/configs").json()["data"]) == ("found", [])

    assert "taken over" in site.cli("take-over", "web-01", "--yes")
    assert site.says() == "ours"
    until(lambda: site.agent()["observed"]["state"] == "taken_over" and site.agent()["state"] == "online")
    assert site.web.post(f"{site.agent_path}/takeover", json={"plan": plan["id"]}).status_code == 409
    site.act("give-back")
    assert (site.says(), found.texts(), found.title()) == ("found", before, title)
    until(lambda: site.agent()["observed"]["state"] == "observing")
    assert site.status()["observed"]["configPath"] == str(found.config)

    site.act("take-over", {"plan": plan["id"]})  # nothing has changed since: it is the same plan
    assert site.says() == "ours"
    until(lambda: site.agent()["observed"]["state"] == "taken_over")
    assert "given back" in site.cli("give-back", "web-01", "--yes")
    assert (site.says(), found.texts(), found.title()) == ("found", before, title)
    until(lambda: "OBSERVING" in site.web.get(f"{site.agent_path}/explain").text)
