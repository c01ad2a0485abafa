"""`fleetplane proxies` as processes, against real servers and agents of the documented contract."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.proxies.documented_agent import DocumentedAgent, documented_agent
from support.shared.cli_runner import Outcome, execute
from support.shared.server_process import ServerProcess, running_server
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.cli.exits import Exit

EMAIL, PASSWORD = "admin@fleetplane.local", "correct horse battery staple"
DEADLINE_SECONDS = 60.0


class Site:
    """A server with a workspace and three agents' tokens."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.login()
        self.organization = self.made("/organizations", name="Acme", slug="acme")["id"]
        self.workspace = self.founded("w")
        self.tokens = [
            self.made(f"/workspaces/{self.workspace}/agents/tokens", name=f"web-{one}", labels={"n": one})
            for one in "123"
        ]

    def login(self) -> None:
        answer = httpx.post(
            f"{self.server.web}/v1/auth/login", json={"email": EMAIL, "password": PASSWORD}, timeout=60
        )
        self.token = answer.json()["access_token"]
        (self.folder / "token").write_text(self.token)

    def founded(self, slug: str) -> str:
        """A new workspace, without agents; its id."""
        made = self.made(f"/organizations/{self.organization}/workspaces", name=slug, slug=slug)
        return str(made["id"])

    def made(self, path: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(
            f"{self.server.web}/v1{path}",
            json=body,
            headers={"authorization": f"Bearer {self.token}"},
            timeout=60,
        )
        assert answer.status_code == 201, answer.text
        told: dict[str, Any] = answer.json()
        return told

    @property
    def where(self) -> list[str]:
        token = str(self.folder / "token")
        return ["--server", self.server.web, "--token-file", token, "--workspace", self.workspace]

    def proxies(self, verb: str, *arguments: str) -> Outcome:
        """The last of several workspaces counts."""
        return execute("proxies", verb, *self.where, *arguments)

    def told(self, verb: str, *arguments: str) -> Any:
        done = self.proxies(verb, "-o", "json", *arguments)
        assert done.code == Exit.OK, done.err
        return json.loads(done.out)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("proxies")
    with running_server(folder / "d", "--only", "proxies", admin_password=PASSWORD) as server:
        yield Site(server, folder)


@pytest.fixture
def agents(site: Site) -> Iterator[list[DocumentedAgent]]:
    with ExitStack() as stack:
        yield [stack.enter_context(documented_agent(site.server, one["token"])) for one in site.tokens]


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_reload_of_many_is_watched_listed_and_shown(site: Site, agents: list[DocumentedAgent]) -> None:
    until(lambda: len(site.told("agents", "--state", "online")) == len(agents))
    assert [one["name"] for one in site.told("agents", "--state", "online")] == ["web-1", "web-2", "web-3"]
    assert len(site.told("preview", "--target", "n in (1,2)")["resolved"]) == 2
    done = site.proxies("run", "--target", "n!=3", "--mode", "rolling=1", "reload")
    assert done.code == Exit.OK, done.err
    assert [line.split()[1:] for line in done.out.splitlines()] == [["ok"], ["ok"]]
    assert done.err.startswith("complete: ok=2")
    assert [agent.commands for agent in agents] == [["reload"], ["reload"], []]
    (newest, *_) = site.told("runs")
    assert (newest["command"], newest["state"], newest["started_by"][:5]) == ("reload", "complete", "user/")
    assert {one["outcome"] for one in site.told("runs", newest["id"])["results"]} == {"ok"}
    # The server's owner, at its socket, needs no token.
    owner = ("--data-dir", str(site.folder / "d"), "--workspace", site.workspace)
    listed = execute("proxies", "runs", "-o", "json", *owner)
    assert [one["id"] for one in json.loads(listed.out)] == [newest["id"]], listed.err
    done = execute("proxies", "run", "--target", "n=3", "reload", *owner)
    assert (done.code, agents[2].commands) == (Exit.OK, ["reload"]), done.err
    assert site.told("runs")[0]["started_by"].startswith("operator/")


def test_nobody_there_and_wrong_words_have_codes_of_their_own(site: Site) -> None:
    assert site.proxies("run", "--target", "@web-9", "reload").code == Exit.UNAVAILABLE
    assert site.proxies("run", "--target", "all", "explode").code == Exit.USAGE
    assert site.proxies("runs", "0" * 32).code == Exit.NOT_FOUND
    nobody = execute("proxies", "runs", "--server", site.server.web, "--workspace", site.workspace)
    assert (nobody.code, "token is required" in nobody.err) == (Exit.USAGE, True)
    stranger = execute("proxies", "runs", *site.where[:2], "--token", "x", "--workspace", site.workspace)
    assert stranger.code == Exit.DENIED
    elsewhere = execute("proxies", "runs", *site.where[:4], "--workspace", "0" * 36)
    assert elsewhere.code == Exit.NOT_FOUND


def test_what_failed_is_tried_again_by_name(site: Site, agents: list[DocumentedAgent]) -> None:
    until(lambda: len(site.told("agents", "--state", "online")) == len(agents))
    assert site.proxies("retry", "web-1", "web-2").code == Exit.OK
    assert site.proxies("retry", "web-9").code == Exit.NOT_FOUND


def test_a_run_outlives_a_server_that_is_killed_and_no_nginx_is_restarted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    with running_server(tmp_path / "d", "--only", "proxies", admin_password=PASSWORD) as server:
        site = Site(server, tmp_path)
        with ExitStack() as stack:
            first = stack.enter_context(documented_agent(server, site.tokens[0]["token"]))
            held = stack.enter_context(documented_agent(server, site.tokens[1]["token"]))
            monkeypatch.setattr(held, "_obey", lambda sent: held.commands.append(sent.WhichOneof("command")))
            last = stack.enter_context(documented_agent(server, site.tokens[2]["token"]))
            until(lambda: len(site.told("agents", "--state", "online")) == 3)
            started = site.proxies(
                "run",
                "--target",
                "all",
                "--mode",
                "sequential",
                "--on-error",
                "continue",
                "--deadline",
                "20s",
                "--detach",
                "restart",
            )
            assert started.code == Exit.OK, started.err
            until(lambda: held.commands)
            os.kill(server.pid, signal.SIGKILL)
            server.process.wait(DEADLINE_SECONDS)
            seen = [first.commands, held.commands, last.commands]
    assert seen == [["restart"], ["restart"], []]
    run_id = started.out.strip()
    with running_server(tmp_path / "d", "--only", "proxies", admin_password=PASSWORD) as server:
        site.server = server
        site.login()
        with ExitStack() as stack:
            again = [stack.enter_context(documented_agent(server, one["token"])) for one in site.tokens]

            def ended() -> Any:
                told = site.told("runs", run_id)
                return told if told["run"]["ended_at"] else None

            told = until(ended)
    names = {one["agent_id"]: f"web-{place}" for place, one in enumerate(site.tokens, 1)}
    assert {names[one["name"]]: one["outcome"] for one in told["results"]} == {
        "web-1": "ok",
        "web-2": "timed_out",
        "web-3": "ok",
    }
    assert told["run"]["state"] == "complete"
    assert [agent.commands for agent in again] == [[], [], ["restart"]]


CONFIG = """
http {
    upstream app { server 127.0.0.1:9; }
    server {
        listen 443 ssl;
        server_name shop.example;
        ssl_certificate server.crt;
        ssl_certificate_key server.key;
        charset utf-8;
        location / { proxy_pass http://app; }
        location ~ \\.php$ { fastcgi_pass 127.0.0.1:9000; }
    }
}
"""


def test_an_existing_configuration_is_reported_and_then_applied(site: Site, tmp_path: Path) -> None:
    ThrowawayCa().server(tmp_path)
    config = tmp_path / "nginx.conf"
    config.write_text(CONFIG)
    workspace = site.founded("imported")  # the agents of the other one know no typed options
    into = ("--workspace", workspace)
    report = site.told("import", *into, str(config))
    outcomes = {line["text"]: line["outcome"] for line in report}
    assert outcomes["charset utf-8"] == "kept raw"
    assert outcomes["fastcgi_pass 127.0.0.1:9000"] == "refused"
    hosts = f"{site.server.web}/v1/workspaces/{workspace}/virtual-hosts"
    own = {"authorization": f"Bearer {site.token}"}
    assert httpx.get(hosts, headers=own, timeout=60).json()["data"] == [], "only a report"
    unconfirmed = site.proxies("import", *into, "--apply", str(config))
    assert unconfirmed.code != Exit.OK
    assert "--confirm-raw" in unconfirmed.err
    assert httpx.get(hosts, headers=own, timeout=60).json()["data"] == []
    done = site.proxies("import", *into, "--apply", "--confirm-raw", str(config))
    assert done.code == Exit.OK, done.err
    (host,) = httpx.get(hosts, headers=own, timeout=60).json()["data"]
    assert (host["server_name"], host["ssl_enabled"]) == ("shop.example", True)
    whole = httpx.get(f"{site.server.web}/v1/virtual-hosts/{host['id']}", headers=own, timeout=60).json()
    assert whole["custom_directives"] == {"charset": "utf-8"}
    assert [one["path"] for one in whole["locations"]] == ["/", "~ \\.php$"]
    assert whole["locations"][1]["respond"]["status"] == 503
    assert site.proxies("import", str(tmp_path / "none")).code != Exit.OK


def test_traffic_is_shown_by_host_and_by_what_was_frequent(site: Site) -> None:
    told = site.told("traffic", "--since", "30d")
    assert told["total"]["requests"] == told["day_before"]["requests"] == 0
    shown = site.proxies("traffic", "--since", "15m")
    assert (shown.code, shown.out.split()[:3]) == (Exit.OK, ["HOST", "REQUESTS", "DAY-BEFORE"])
    assert site.proxies("traffic", "--top").code == Exit.OK
    wrong = site.proxies("traffic", "--since", "soon")
    assert (wrong.code != Exit.OK, "15m, 6h or 30d" in wrong.err) == (True, True)
