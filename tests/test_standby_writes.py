"""Objects of the resource API are written on every server of a shared database."""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fleet.plans_rig import ACME, group
from support.shared.cli_runner import execute
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import START_SECONDS, running_server
from support.shared.waiting_server import WaitingServer, patient

ONLY = ("--only", "edge,boards")
DEADLINE_SECONDS = 60.0
RACES = 20
GROUPS = f"/scopes{ACME}/edge-groups"


class Writer:
    """Somebody with a token, at one server; asks again while that cannot say that it is up to date."""

    def __init__(self, web: str, bearer: str) -> None:
        self.fleet = f"{web}/v1/fleet"
        self.http = httpx.Client(
            base_url=f"{web}/apis/v1",
            headers={"authorization": f"Bearer {bearer}"},
            timeout=DEADLINE_SECONDS,
        )

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            answer = self.http.request(method, path, json=body, headers=named)
            if answer.status_code != 503 or answer.json().get("reason") == "StandsBy":
                return answer
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)

    def put(self, name: str, os: str, **headers: str) -> httpx.Response:
        return self.call("PUT", f"{GROUPS}/{name}", group(name, selector={"os": os}), **headers)

    def names(self) -> list[str]:
        answer = self.call("GET", f"{GROUPS}?limit=500")
        assert answer.status_code == 200, answer.text
        return [item["metadata"]["name"] for item in answer.json()["items"]]


@pytest.mark.timeout(600)
def test_objects_are_written_on_a_standby_as_on_the_active_server(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    with running_server(tmp_path / "one", *ONLY, environment=environment) as one:
        made = execute("tokens", "create", "writer", "--role", "admin", "--data-dir", str(tmp_path / "one"))
        assert made.code == 0, made.err
        bearer = made.out.strip().splitlines()[-1]
        web = f"127.0.0.1:{free_port()}"
        at = ("--set", f"listeners.web.addresses={web}")
        with WaitingServer(tmp_path / "two", environment, *ONLY, *at) as two:
            two.until(lambda: "standby.reads_served" in two.told())
            active, standby = Writer(one.web, bearer), Writer(f"http://{web}", bearer)
            try:
                _in_turns(active, standby)
                _told_to_watchers(active, standby)
                _at_once(active, standby)
                _plans(active, standby)
                _once(active, standby)
                _rollouts(active, standby)
                _refusals(standby)
                before = standby.names()
                one.process.kill()
                one.process.wait(START_SECONDS)
                two.until(lambda: two.is_ready, START_SECONDS)
                successor = Writer(two.server().web, bearer)
                with successor.http:
                    assert successor.names() == before
                    assert successor.put("after", "linux").status_code == 201
            finally:
                active.http.close()
                standby.http.close()


def _in_turns(active: Writer, standby: Writer) -> None:
    """What one has acknowledged the other knows, whichever it is: to read, and to change."""
    made = standby.put("web", "linux")
    assert made.status_code == 201, made.text
    found = active.call("GET", f"{GROUPS}/web")
    assert (found.status_code, found.json()) == (200, made.json())
    tag = made.headers["etag"]
    for turn in range(6):
        writer, reader = (active, standby) if turn % 2 else (standby, active)
        changed = writer.put("web", ("linux", "darwin")[turn % 2], if_match=tag)
        assert changed.status_code == 200, changed.text
        assert reader.put("web", "windows", if_match='"1"').status_code == 412
        tag = changed.headers["etag"]
        assert reader.call("GET", f"{GROUPS}/web").headers["etag"] == tag
    assert standby.call("DELETE", f"{GROUPS}/web").status_code == 204
    assert active.call("GET", f"{GROUPS}/web").status_code == 404
    assert active.call("DELETE", f"{GROUPS}/web").status_code == 404


def _rollouts(active: Writer, standby: Writer) -> None:
    """Rollouts and their policies are the same on both: what is accepted, what is refused, and why."""
    policy = {"subject": "edge.config", "scope": "", "policy": {"waves": ["rest"]}}
    made = standby.call("PUT", f"{standby.fleet}/rollout-policies", policy)
    assert made.status_code == 200, made.text
    shown = active.call("GET", f"{active.fleet}/rollout-policies").json()
    assert [one["subject"] for one in shown["policies"]] == ["edge.config"]
    wanted = {"subject": "edge.config", "scope": "tenant/acme", "to": "newest"}
    answers = [one.call("POST", f"{one.fleet}/rollouts", wanted) for one in (standby, active)]
    assert [answer.status_code for answer in answers] == [404, 404], [one.text for one in answers]
    assert all("has no daemons" in answer.text for answer in answers)
    gone = standby.call("DELETE", f"{standby.fleet}/rollout-policies?subject=edge.config&scope=")
    assert gone.status_code == 204, gone.text


def _told_to_watchers(active: Writer, standby: Writer) -> None:
    """The active server learns by itself what was written elsewhere: its watches and controllers are told."""
    begun, told = threading.Event(), list[str]()

    def watch() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline and "watched" not in told:
            with (
                suppress(httpx.TransportError),
                active.http.stream("GET", "/watch", params={"of": "edge-groups"}) as stream,
            ):
                for line in stream.iter_lines():
                    begun.set()
                    if line.startswith("data:") and "watched" in line:
                        told.append("watched")
                        return

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(watch)
        assert begun.wait(DEADLINE_SECONDS)
        assert standby.put("watched", "linux").status_code == 201
        watching.result(DEADLINE_SECONDS)
    assert told == ["watched"]


def _at_once(active: Writer, standby: Writer) -> None:
    """One object made at both at the same time is made once."""
    with ThreadPoolExecutor(2) as threads:
        for number in range(RACES):
            makers: list[Callable[[], httpx.Response]] = [
                lambda writer=writer, name=f"race{number}": writer.put(name, "linux", if_none_match="*")  # type: ignore[misc]
                for writer in (active, standby)
            ]
            answers = list(threads.map(lambda make: make(), makers))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [201, 412], [answer.text for answer in answers]


def _plans(active: Writer, standby: Writer) -> None:
    """A plan is made at one and applied at the other, once."""
    for maker, applier in ((active, standby), (standby, active)):
        name = "by-active" if maker is active else "by-standby"
        plan = maker.call("POST", "/plans", {"objects": [group(name)], "scope": ACME})
        assert plan.status_code == 201, plan.text
        path = f"/plans/{plan.json()['id']}"
        assert applier.call("GET", path).json()["state"] == "open"
        applied = applier.call("POST", f"{path}/apply")
        assert (applied.status_code, applied.json()["state"]) == (200, "applied"), applied.text
        assert name in maker.names()
        again = maker.call("POST", f"{path}/apply")
        assert again.json()["appliedRevision"] == applied.json()["appliedRevision"]


def _once(active: Writer, standby: Writer) -> None:
    """A key at both at the same time makes one plan, and both tell of it."""
    body = {"objects": [group("keyed")], "scope": ACME}
    with ThreadPoolExecutor(2) as threads:
        for number in range(RACES):

            def ask(writer: Writer, key: str = f"once{number}") -> httpx.Response:
                deadline = time.monotonic() + DEADLINE_SECONDS
                while True:
                    answer = writer.call("POST", "/plans", body, idempotency_key=key)
                    if answer.status_code != 409:  # while the other is at it
                        return answer
                    assert time.monotonic() < deadline, answer.text

            answers = list(threads.map(ask, (active, standby)))
            assert {answer.status_code for answer in answers} == {201}, [answer.text for answer in answers]
            assert len({answer.json()["id"] for answer in answers}) == 1
            assert sum("idempotency-replayed" in answer.headers for answer in answers) == 1


def _revoked(active: Writer, standby: Writer, data: Path) -> None:
    """A token that is revoked at the standby is refused by the other at its next call."""
    made = execute("tokens", "create", "passing", "--role", "viewer", "--data-dir", str(data))
    assert made.code == 0, made.err
    holder = {"authorization": f"Bearer {made.out.strip().splitlines()[-1]}"}
    assert active.call("GET", GROUPS, **holder).status_code == 200
    done = standby.call("POST", "/tokens/passing/actions/revoke", {})
    assert done.status_code < 300, done.text
    assert active.call("GET", GROUPS, **holder).status_code == 401


def _refusals(standby: Writer) -> None:
    """Whatever is not done everywhere is refused with the name of the active server."""
    answer = standby.http.post(f"{standby.fleet}/audit/verify")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SERVICE_UNAVAILABLE"), answer.text
    assert "/one is active" in answer.json()["error"]["message"]
    anonymous = httpx.put(f"{standby.http.base_url}edge-groups/x", json=group("x"), timeout=DEADLINE_SECONDS)
    assert anonymous.status_code == 401
