"""NGINX agents at any of three servers on one PostgreSQL, and REST of proxies at all of them."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets.exceptions
from support.proxies import brisk_agent
from support.proxies.obedient_agent import ObedientAgent
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import STOP_SECONDS, ServerProcess, running_server
from support.shared.waiting_server import WaitingServer, patient
from websockets.sync.client import connect

from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb

PASSWORD = "correct horse battery staple"
ONLY = ("--only", "proxies", "--set", "proxies.critical_after_seconds=3600")
DEADLINE_SECONDS = 120.0
RACES = 6


def until(condition: Callable[[], Any], why: Callable[[], str] = lambda: "it did not come to be") -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)
    return found


@dataclass
class Site:
    """One server, as its clients see it."""

    web: str
    agents: str
    token: str = ""

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.web, timeout=DEADLINE_SECONDS)

    def ask(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Again while the server cannot say that it is up to date."""
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            answer = self.http.request(method, f"/v1{path}", json=body, headers=headers)
            if answer.status_code != 503 or "StandsBy" in answer.text or "STANDS_BY" in answer.text:
                return answer
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.ask(method, path, body)
        assert answer.status_code < 300, f"{method} {path} at {self.web}: {answer.text}"
        return answer.json() if answer.content else None

    def state(self, agent: str) -> str:
        return str(self.call("GET", f"/agents/{agent}")["state"])


def has_state(site: Site, agent: str, state: str) -> bool:
    return site.state(agent) == state


@dataclass
class Cluster:
    one: Site
    two: Site
    three: Site
    third: WaitingServer
    active: ServerProcess

    @property
    def sites(self) -> tuple[Site, Site, Site]:
        return self.one, self.two, self.three

    def agent(self, site: Site, token: str, **about: Any) -> ObedientAgent:
        authority = self.one.http.get("/.well-known/ca.pem").content
        return ObedientAgent(site.agents, authority, token, **about)


class Listener:
    """Somebody who hears every event, over the WebSocket of one server."""

    def __init__(self, site: Site) -> None:
        self._url = f"{site.web.replace('http', 'ws', 1)}/v1/events?token={site.token}"
        self.heard: list[dict[str, Any]] = []
        self.error: list[str] = []
        self.since: Any = None
        self._begun = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listener")

    def types(self) -> list[str]:
        return [one["type"] for one in self.heard]

    def _listen(self) -> None:
        with connect(self._url, open_timeout=DEADLINE_SECONDS, max_size=None) as socket:
            asked = {"action": "subscribe", "events": ["*"]}
            socket.send(json.dumps(asked if self.since is None else {**asked, "since": self.since}))
            while not self._stop.is_set():
                try:
                    said = json.loads(socket.recv(timeout=0.2))
                except TimeoutError:
                    continue
                except websockets.exceptions.ConnectionClosed:
                    return
                self._begun.set()
                if "cursor" in said.get("data", {}):
                    self.heard.append(said)
                elif said["type"] == "error":
                    self.error.append(str(said))

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._thread.start()
        try:
            assert self._begun.wait(DEADLINE_SECONDS), "nobody answers the listener"
            yield
        finally:
            self._stop.set()
            self._thread.join(DEADLINE_SECONDS)


def _serves(server: WaitingServer) -> bool:
    return "standby.reads_served" in server.told()


@contextmanager
def running(folder: Path, postgres: PostgresServer) -> Iterator[Cluster]:
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
        "FLEETPLANE_PROXIES__ADMIN_PASSWORD": PASSWORD,
    }
    with ExitStack() as stack:
        active = stack.enter_context(running_server(folder / "one", *ONLY, environment=environment))
        agents = active.address("proxy-agents", "https://").removeprefix("https://")
        sites = [Site(active.web, agents)]
        waiting = []
        for name in ("two", "three"):
            web, place = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            listen = (
                "--set",
                f"listeners.web.addresses={web}",
                "--set",
                f"listeners.proxy-agents.addresses={place}",
            )
            waiting.append(stack.enter_context(WaitingServer(folder / name, environment, *ONLY, *listen)))
            sites.append(Site(f"http://{web}", place))
        for server in waiting:
            server.until(partial(_serves, server))
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        token = sites[0].call("POST", "/auth/login", login)["access_token"]
        for site in sites:
            site.token = token
            stack.callback(site.http.close)
        one, two, three = sites
        yield Cluster(one=one, two=two, three=three, third=waiting[1], active=active)


@pytest.mark.timeout(900)
def test_agents_and_rest_of_proxies_are_served_by_every_server(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with running(tmp_path, postgres) as cluster:
        _moves(cluster)
        with tempfile.TemporaryDirectory(prefix="fp") as short:  # the names of sockets in it have a limit
            Path(short).chmod(0o755)
            _own_agent(cluster, Path(short) / "a")
        _contention(cluster)
        _people(cluster)
        _races(cluster)
        _events(cluster)
        _death(cluster)


@dataclass
class Fleet:
    """A workspace with one agent and one host, each made at another server."""

    cluster: Cluster

    def __post_init__(self) -> None:
        one, two, three = self.cluster.sites
        slug = f"s{secrets.token_hex(4)}"
        self.organization = two.call("POST", "/organizations", {"name": "Acme", "slug": slug})["id"]
        path = f"/organizations/{self.organization}/workspaces"
        self.workspace = three.call("POST", path, {"name": "Production", "slug": slug})["id"]
        tokens = f"/workspaces/{self.workspace}/agents/tokens"
        made = one.call("POST", tokens, {"name": "web-1"})
        self.agent, self.token = made["agent_id"], made["token"]
        body = {
            "name": "a",
            "server_name": "a.test",
            "listen_port": 8080,
            "locations": [{"path": "/", "root": "/srv"}],
        }
        self.host = two.call("POST", f"/workspaces/{self.workspace}/virtual-hosts", body)["id"]

    def change(self, site: Site, root: str) -> int:
        """Change the host; the version that follows."""
        site.call("PATCH", f"/virtual-hosts/{self.host}", {"locations": [{"path": "/", "root": root}]})
        return int(site.call("GET", f"/workspaces/{self.workspace}/configs")["data"][0]["version"])

    def outcome(self, site: Site, version: int) -> tuple[str | None, bool]:
        path = f"/workspaces/{self.workspace}/configs/{version}/agents"
        (row,) = [one for one in site.call("GET", path)["data"] if one["agent_id"] == self.agent]
        return row["state"], row["in_service"]

    def is_confirmed(self, site: Site, version: int) -> bool:
        return self.outcome(site, version) == ("success", True)

    def lines(self, site: Site) -> bool:
        found = site.call("GET", f"/workspaces/{self.workspace}/access-logs?status_code=5xx")["data"]
        return [one["uri"] for one in found] == ["/checkout"]

    def order(self, site: Site) -> str:
        answer = site.call("POST", f"/agents/{self.agent}/reload")
        assert answer["success"], answer
        return str(answer["message"])


def _moves(cluster: Cluster) -> None:
    """An agent is served by whichever server it is connected to."""
    fleet, listener = Fleet(cluster), Listener(cluster.three)
    one, two, three = cluster.sites
    with listener.listening():
        with ExitStack() as leaving:
            first = leaving.enter_context(cluster.agent(two, fleet.token))
            assert first.registered is not None
            assert first.registered.success, first.registered.error_message
            for site in cluster.sites:
                until(partial(has_state, site, fleet.agent, "online"))
            # What is changed at one server is served by the other's agent, and confirmed at all.
            version = fleet.change(one, "/srv/one")
            until(lambda: version in first.versions)
            for site in cluster.sites:
                until(partial(fleet.is_confirmed, site, version))
            for site in cluster.sites:
                assert fleet.order(site) == "done at web-01"
            _retried(fleet, first, cluster)
            # What it logs is found at every server.
            entry = pb.LogEntry(level="access", fields={"id": "line-1", "status": "500", "uri": "/checkout"})
            first.say(logs=pb.LogBatch(entries=[entry]))
            for site in cluster.sites:
                until(partial(fleet.lines, site))
            # It moves: its older stream ends, and nobody is told that it was away.
            second = leaving.enter_context(cluster.agent(three, fleet.token))
            assert second.registered is not None
            assert second.registered.success, second.registered.error_message
            until(lambda: first.errors)
            assert first.errors[-1] == "SUPERSEDED"
            version = fleet.change(two, "/srv/two")
            until(lambda: version in second.versions)
            for site in cluster.sites:
                until(partial(fleet.is_confirmed, site, version))
                assert fleet.order(site) == "done at web-01"
            assert len(second.commands) == 3
            assert "agent.disconnected" not in listener.types()
        until(lambda: "agent.disconnected" in listener.types())
        for site in cluster.sites:
            until(partial(has_state, site, fleet.agent, "offline"))


def _own_agent(cluster: Cluster, place: Path) -> None:
    """The product's agent exchanges its token for a certificate at a server that stands by, and serves."""
    if shutil.which("nginx") is None:
        return
    fleet, port = Fleet(cluster), free_port()
    place.mkdir(mode=0o755)
    (place / "ca.pem").write_bytes(cluster.two.http.get("/.well-known/ca.pem").content)
    (place / "token").write_text(fleet.token)
    command = [sys.executable, brisk_agent.__file__, cluster.two.agents, str(place), "8080", str(port)]
    with (place / "agent.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(
            partial(has_state, cluster.one, fleet.agent, "online"),
            lambda: (
                f"{cluster.one.call('GET', f'/agents/{fleet.agent}')} {(place / 'agent.log').read_text()}"
            ),
        )
        version = fleet.change(cluster.one, "/srv/www/one")
        for site in cluster.sites:
            until(partial(fleet.is_confirmed, site, version))
        machine = cluster.three.call("GET", f"/agents/{fleet.agent}/machine")
        assert machine["key_fingerprint"], machine
        assert fleet.order(cluster.three)
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _told(place: Path) -> str:
    return (place / "agent.log").read_text()


def _retried(fleet: Fleet, agent: ObedientAgent, cluster: Cluster) -> None:
    """What failed at an agent is tried again, whichever server is asked for it."""
    agent.refuses = 'nginx: [emerg] unknown directive "x"'
    version = fleet.change(cluster.one, "/srv/refused")
    until(lambda: fleet.outcome(cluster.one, version)[0] == "failed")
    agent.refuses = ""
    tried = cluster.three.call("POST", f"/agents/{fleet.agent}/retry")
    assert tried["agents"] == [fleet.agent]
    until(lambda: fleet.is_confirmed(cluster.one, version))


def _contention(cluster: Cluster) -> None:
    """Another machine with the token is refused at every server."""
    fleet = Fleet(cluster)
    with cluster.agent(cluster.two, fleet.token, hostname="web-01") as held:
        for site in (cluster.one, cluster.three):
            with cluster.agent(site, fleet.token, hostname="thief") as thief:
                assert thief.registered is not None
                assert not thief.registered.success
                assert "another machine" in thief.registered.error_message
        assert not held.errors, "whoever is refused ends nothing"
        assert fleet.order(cluster.one) == "done at web-01"
        # A token that was replaced at one server ends the stream at another.
        cluster.three.call("POST", f"/agents/{fleet.agent}/token", {})
        until(lambda: held.errors)
        assert held.errors[-1] == "UNAUTHENTICATED"


def _people(cluster: Cluster) -> None:
    """Who logs in at one server is known at the others, and a refresh token is good once among them."""
    one, two, three = (Site(site.web, site.agents) for site in cluster.sites)
    with one.http, two.http, three.http:
        login = {"email": "admin@fleetplane.local", "password": PASSWORD}
        pair = two.call("POST", "/auth/login", login)
        one.token = three.token = pair["access_token"]
        assert three.call("GET", "/auth/me")["user"]["email"] == login["email"]
        refresh = {"refresh_token": pair["refresh_token"]}
        with ThreadPoolExecutor(3) as threads:
            answers = list(
                threads.map(lambda site: site.ask("POST", "/auth/refresh", refresh), (one, two, three))
            )
        assert [answer.status_code for answer in answers].count(200) == 1, [one.text for one in answers]
        # Whoever showed it again ended the login, on all servers.
        for site in (one, three):
            assert site.ask("GET", "/auth/me").status_code == 401
        # A program's token works everywhere until it is revoked anywhere.
        fleet = Fleet(cluster)
        wanted = {"name": "ci", "role": "viewer", "organization_id": fleet.organization}
        made = cluster.two.call("POST", "/api-tokens", wanted)
        three.token = made["token"]
        assert three.call("GET", f"/workspaces/{fleet.workspace}/agents")["data"]
        cluster.one.call("DELETE", f"/api-tokens/{made['id']}")
        assert three.ask("GET", f"/workspaces/{fleet.workspace}/agents").status_code == 401


def _races(cluster: Cluster) -> None:
    """Of an organisation that is deleted and gets a workspace at once, one is refused."""
    with ThreadPoolExecutor(2) as threads:
        for number in range(RACES):
            slug = f"r{secrets.token_hex(4)}"
            made = cluster.one.call("POST", "/organizations", {"name": "Org", "slug": slug})["id"]
            first, second = (cluster.two, cluster.three) if number % 2 else (cluster.three, cluster.one)
            deleting = threads.submit(first.ask, "DELETE", f"/organizations/{made}")
            workspace = {"name": "Ws", "slug": "ws"}
            path = f"/organizations/{made}/workspaces"
            making = second.ask("POST", path, workspace)  # while the other is at it
            statuses = (deleting.result(), making)
            codes = tuple(one.status_code for one in statuses)
            assert codes in ((204, 404), (204, 403), (409, 201)), [one.text for one in statuses]


def _events(cluster: Cluster) -> None:
    """Whoever hears events goes on at another server, and misses none."""
    fleet, before = Fleet(cluster), Listener(cluster.one)
    with before.listening():
        fleet.change(cluster.three, "/srv/one")
        until(lambda: "virtual_host.updated" in before.types())
    begun = before.heard[-1]["data"]["cursor"]
    missed = fleet.change(cluster.one, "/srv/two")
    after = Listener(cluster.two)
    after.since = begun
    with after.listening():
        until(lambda: "virtual_host.updated" in after.types())
        fleet.change(cluster.two, "/srv/three")
        until(lambda: after.types().count("virtual_host.updated") == 2)
    assert missed
    assert after.error == []
    places = [_place(one["data"]["cursor"]) for one in after.heard]
    assert places == sorted(places)
    assert min(places) > _place(begun)


def _place(cursor: str) -> tuple[int, ...]:
    """Of an event: what one transaction did may be several, and the first of them be the last one heard."""
    return tuple(map(int, cursor.split(".")))


def _death(cluster: Cluster) -> None:
    """The agent of a server that is killed is served by another, and was never away."""
    fleet, listener = Fleet(cluster), Listener(cluster.one)
    one, two, three = cluster.sites
    with listener.listening(), ExitStack() as leaving:
        first = leaving.enter_context(cluster.agent(three, fleet.token))
        assert first.registered is not None
        assert first.registered.success
        until(lambda: two.state(fleet.agent) == "online")
        cluster.third.process.kill()
        cluster.third.process.wait(STOP_SECONDS)
        second = leaving.enter_context(cluster.agent(two, fleet.token))
        assert second.registered is not None
        assert second.registered.success, second.registered.error_message
        version = fleet.change(one, "/srv/after")
        until(lambda: version in second.versions)
        until(lambda: fleet.is_confirmed(one, version))
        assert fleet.order(one) == "done at web-01"
        # What the dead server had is ended by the active one, and the agent is not among it.
        until(lambda: any(said["event"] == "presence.server_gone" for said in cluster.active.logged()))
        assert (one.state(fleet.agent), two.state(fleet.agent)) == ("online", "online")
        about = [said for said in listener.heard if said["data"].get("agent_id") == fleet.agent]
        assert "agent.connected" in [said["type"] for said in about]
        assert "agent.disconnected" not in [said["type"] for said in about]
