"""People sign in and manage accounts and tokens at every server of a shared database."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.shared.cli_runner import execute
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import running_server
from support.shared.waiting_server import WaitingServer, patient

ONLY = ("--only", "gpus,proxies")
DEADLINE_SECONDS = 60.0
RACES = 10
PASSWORD = "correct horse battery"


class Person:
    """Somebody who calls one server; asks again while that cannot say that it is up to date."""

    def __init__(self, web: str) -> None:
        self.http = httpx.Client(base_url=f"{web}/apis/v1/people", timeout=DEADLINE_SECONDS)

    def call(
        self, method: str, path: str, body: Any = None, *, bearer: str = "", key: str = ""
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
        if key:
            headers["idempotency-key"] = key
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            answer = self.http.request(method, path, json=body, headers=headers)
            is_late = answer.status_code == 503 and "is active" not in answer.text
            is_busy = answer.status_code == 409 and "still running" in answer.text
            if not is_late and not is_busy:
                return answer
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.05)


@dataclass(frozen=True)
class Pair:
    active: Person
    standby: Person
    folders: tuple[Path, Path]

    @property
    def in_turns(self) -> Iterator[tuple[Person, Person]]:
        """Each of them, with the other."""
        yield self.active, self.standby
        yield self.standby, self.active


@contextmanager
def two_servers(folder: Path, url: str) -> Iterator[Pair]:
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": url,
        "FLEETPLANE_PROXIES__ADMIN_PASSWORD": PASSWORD,
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    web = f"127.0.0.1:{free_port()}"
    with (
        running_server(folder / "one", *ONLY, environment=environment) as one,
        WaitingServer(folder / "two", environment, *ONLY, "--set", f"listeners.web.addresses={web}") as two,
    ):
        two.until(lambda: "standby.reads_served" in two.told())
        active, standby = Person(one.web), Person(f"http://{web}")
        with active.http, standby.http:
            yield Pair(active, standby, (folder / "one", folder / "two"))


@pytest.mark.timeout(600)
def test_people_sign_in_and_manage_tokens_at_every_server(tmp_path: Path, postgres: PostgresServer) -> None:
    with two_servers(tmp_path, postgres.database()) as pair:
        root = _owner_makes_a_token_at(pair.folders[1])
        for index, (one, other) in enumerate(pair.in_turns):
            _accounts(one, other, root, name=f"ann{index}")
            _tokens(one, other, root, name=f"robot{index}")
            _users_of_proxies(one, other)
        _once(pair, root)
        gone = execute("tokens", "revoke", "root", "--data-dir", str(pair.folders[1]))
        assert gone.code == 0, gone.err
        assert pair.active.call("GET", "/whoami", bearer=root).status_code == 401


def _owner_makes_a_token_at(folder: Path) -> str:
    """At the socket of the server that stands by."""
    made = execute("tokens", "create", "root", "--role", "admin", "--data-dir", str(folder))
    assert made.code == 0, made.err
    return made.out.strip().splitlines()[-1]


def _accounts(one: Person, other: Person, root: str, *, name: str) -> None:
    """Made here, logged in there, refreshed here, ended there."""
    made = one.call("POST", "/accounts", {"name": name, "password": PASSWORD}, bearer=root)
    assert made.status_code == 201, made.text
    twice = other.call("POST", "/accounts", {"name": name, "password": PASSWORD}, bearer=root)
    assert twice.status_code == 409, twice.text
    wrong = one.call("POST", "/login", {"name": name, "password": "not this one, no"})
    assert wrong.status_code == 401, wrong.text
    opened = other.call("POST", "/login", {"name": name, "password": PASSWORD})
    assert opened.status_code == 200, opened.text
    who = one.call("GET", "/whoami", bearer=opened.json()["accessToken"])
    assert (who.status_code, who.json()["name"]) == (200, f"account/{name}"), who.text
    following = one.call("POST", "/refresh", {"refreshToken": opened.json()["refreshToken"]})
    assert following.status_code == 200, following.text
    bearer = following.json()["accessToken"]
    bound = one.call(
        "POST", "/bindings", {"subject": f"account/{name}", "role": "fleet.viewer", "scope": "/"}, bearer=root
    )
    assert bound.status_code == 201, bound.text
    roles = other.call("GET", "/whoami", bearer=bearer)
    assert "fleet.viewer" in roles.text
    out = other.call("POST", "/logout", bearer=bearer)
    assert out.status_code == 204, out.text
    assert one.call("GET", "/whoami", bearer=bearer).status_code == 401
    again = other.call("POST", "/refresh", {"refreshToken": following.json()["refreshToken"]})
    assert again.status_code == 401


def _tokens(one: Person, other: Person, root: str, *, name: str) -> None:
    """What was revoked here is refused there, by the next call."""
    body = {"name": name, "roles": ["fleet.viewer"], "scope": "/", "expiresInSeconds": 3600}
    made = one.call("POST", "/tokens", body, bearer=root)
    assert made.status_code == 201, made.text
    bearer = made.json()["token"]
    assert other.call("GET", "/whoami", bearer=bearer).json()["name"] == f"token/{name}"
    assert other.call("POST", "/tokens", body, bearer=root).status_code == 409
    assert other.call("DELETE", f"/tokens/{name}", bearer=root).status_code == 204
    assert one.call("GET", "/whoami", bearer=bearer).status_code == 401


def _users_of_proxies(one: Person, other: Person) -> None:
    """A domain's own users log in here and are known there; the first one was made once."""

    def call(person: Person, method: str, path: str, body: Any = None, *, bearer: str = "") -> httpx.Response:
        return person.call(
            method, str(person.http.base_url.copy_with(path=f"/v1{path}")), body, bearer=bearer
        )

    opened = call(one, "POST", "/auth/login", {"email": "admin@fleetplane.local", "password": PASSWORD})
    assert opened.status_code == 200, opened.text
    me = call(other, "GET", "/auth/me", bearer=opened.json()["access_token"])
    assert me.status_code == 200, me.text
    following = call(other, "POST", "/auth/refresh", {"refresh_token": opened.json()["refresh_token"]})
    assert following.status_code == 200, following.text
    bearer = following.json()["access_token"]
    assert call(other, "GET", "/users", bearer=bearer).json()["meta"]["total"] == 1
    assert call(one, "POST", "/auth/logout", bearer=bearer).status_code == 204
    assert call(other, "GET", "/auth/me", bearer=bearer).status_code == 401


def _once(pair: Pair, root: str) -> None:
    """One key at both at the same time: one token, which both tell."""
    with ThreadPoolExecutor(2) as threads:
        for number in range(RACES):
            body = {
                "name": f"once{number}",
                "roles": ["fleet.viewer"],
                "scope": "/",
                "expiresInSeconds": 3600,
            }

            def ask(person: Person, body: Any = body, key: str = f"k{number}") -> httpx.Response:
                return person.call("POST", "/tokens", body, bearer=root, key=key)

            answers = list(threads.map(ask, (pair.active, pair.standby)))
            assert {one.status_code for one in answers} == {201}, [one.text for one in answers]
            assert len({one.content for one in answers}) == 1
            assert sum("idempotency-replayed" in one.headers for one in answers) == 1
