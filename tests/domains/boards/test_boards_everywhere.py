"""Boards at any of three servers on one PostgreSQL: joining, reports, silence, REST, a server that dies."""

from __future__ import annotations

import base64
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.boards.boards_processes import Certified, Place, config_of
from support.boards.boards_rig import BoardKey
from support.shared.cli_runner import execute
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import ServerProcess, running_server
from support.shared.waiting_server import WaitingServer, patient
from websockets.sync.client import connect

from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc

ONLY = ("--only", "boards", "--set", "boards.heartbeat_seconds=2")
DEADLINE_SECONDS = 60.0
REPORT_SECONDS = 0.3
LOOK_SECONDS = 0.5
"""Two requests to each server, which takes a thousand a minute."""
RACES = 5


def until(condition: Callable[[], Any], *, every_seconds: float = 0.1) -> Any:
    deadline = time.monotonic() + 2 * DEADLINE_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(every_seconds)
    return found


@dataclass
class Site:
    """One server, as boards and people see it."""

    web: str
    boards: str
    token: str
    active: ServerProcess | None = None
    """Of the one that is active at first."""
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(
            base_url=f"{self.web}/api/v1",
            timeout=DEADLINE_SECONDS,
            headers={"authorization": f"Bearer {self.token}"},
        )

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        """Again while the server cannot say that it is up to date."""
        deadline = time.monotonic() + 2 * DEADLINE_SECONDS
        while True:
            answer = self.http.request(method, path, json=body, headers=headers)
            if answer.status_code != 503 or "stands by" in answer.text:
                return answer
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)

    def did(self, method: str, path: str, body: Any = None) -> Any:
        answer = self.ask(method, path, body)
        assert answer.status_code < 300, f"{method} {path} at {self.web}: {answer.text}"
        return answer.json() if answer.content else None

    def state(self, number: int) -> str:
        return str(self.did("GET", f"/nodes/{number}")["data"]["status"])

    def join(self, name: str, trust: bytes) -> Certified:
        """A board that makes its token and registers here."""
        key = BoardKey()
        token = self.did("POST", "/join-tokens", {"name": name})["token"]
        said = pb.NodeRegistration(name=name, join_token=token, csr_pem=key.csr, boot_id="first")
        with grpc.secure_channel(self.boards, grpc.ssl_channel_credentials(trust)) as channel:
            answer = until(partial(_called, boards_pb2_grpc.ControlPlaneStub(channel).RegisterNode, said))
        assert answer.success, answer
        return Certified(
            number=answer.node_id, key=key.pem, certificate=answer.certificate_pem.encode(), trust=trust
        )


def _called(method: Any, request: Any) -> Any:
    """The answer; None if the server is gone, or cannot say that it is up to date."""
    try:
        return method(request, timeout=DEADLINE_SECONDS)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
        return None


@contextmanager
def sites(tmp_path: Path, postgres: PostgresServer) -> Iterator[list[Site]]:
    """One that is active, and two that stand by."""
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
    }
    with ExitStack() as stack:
        one = stack.enter_context(running_server(tmp_path / "one", *ONLY, environment=environment))
        made = execute("tokens", "create", "boss", "--role", "admin", "--data-dir", str(tmp_path / "one"))
        assert made.code == 0, made.err
        token = made.out.strip().splitlines()[-1]
        address = one.address("boards", "https").removeprefix("https://")
        found = [Site(one.web, address, token, one)]
        for name in ("two", "three"):
            web, boards = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            at = ("--set", f"listeners.web.addresses={web}", "--set", f"listeners.boards.addresses={boards}")
            waiting = stack.enter_context(WaitingServer(tmp_path / name, environment, *ONLY, *at))
            found.append(Site(f"http://{web}", boards, token))
            waiting.until(lambda waiting=waiting: "standby.reads_served" in waiting.told())  # type: ignore[misc]
        for site in found:
            stack.callback(site.http.close)
        yield found


@pytest.mark.timeout(600)
def test_boards_call_any_server_and_none_of_them_is_missed(tmp_path: Path, postgres: PostgresServer) -> None:
    with sites(tmp_path, postgres) as everyone:
        one, two, three = everyone
        trust = two.did("GET", "/ca/certificate")["certificate_pem"].encode()
        attic, quiet = two.join("attic", trust), three.join("quiet", trust)
        assert attic.number != quiet.number
        for site in everyone:
            assert [site.state(board.number) for board in (attic, quiet)] == ["ready", "ready"]
        with _reporting(attic, everyone) as reports:
            _people(one, two, three, attic)
            _races(everyone)
            _commands(tmp_path, one, two, three)
            _feed(three, partial(two.did, "POST", "/nodes", {"name": "told"}))
            # Nobody hears the one; the other is heard by each server now and then, and never missed.
            until(lambda: _is_missed(quiet, attic, everyone), every_seconds=LOOK_SECONDS)
            before = reports()
            assert one.active is not None
            one.active.process.kill()
            left = [two, three]
            until(lambda: any(_is_active(site) for site in left))
            assert {site.state(attic.number) for site in left} == {"ready"}
            until(lambda: reports() > before + 3)


def _is_missed(quiet: Certified, attic: Certified, everyone: list[Site]) -> bool:
    missed = all(site.state(quiet.number) != "ready" for site in everyone)
    assert {site.state(attic.number) for site in everyone} == {"ready"}
    return missed


def _is_active(site: Site) -> bool:
    try:
        return httpx.get(f"{site.web}/readyz", timeout=DEADLINE_SECONDS).status_code == 200
    except httpx.TransportError:  # it opens its listeners anew
        return False


def _people(one: Site, two: Site, three: Site, attic: Certified) -> None:
    """What people write on one server is there on the others."""
    cluster = two.did("POST", "/clusters", {"name": "house"})["id"]
    three.did("POST", f"/clusters/{cluster}/nodes", {"node_id": attic.number})
    members = one.did("GET", f"/clusters/{cluster}/nodes")["nodes"]
    assert [member["id"] for member in members] == [attic.number]
    assert three.ask("DELETE", f"/clusters/{cluster}").status_code == 409
    device = three.did("POST", "/gpio", {"node_id": attic.number, "pin_number": 17, "name": "lamp"})
    number = device["data"]["id"]
    assert (
        one.ask("POST", "/gpio", {"node_id": attic.number, "pin_number": 17, "name": "x"}).status_code == 409
    )
    two.did("DELETE", f"/gpio/{number}")
    issued = two.did("GET", "/ca/certificates")
    assert issued == one.did("GET", "/ca/certificates")
    assert two.ask("POST", f"/gpio/{number}/write", {"value": 1}).status_code == 404


def _commands(tmp_path: Path, one: Site, two: Site, three: Site) -> None:
    """A program is asked for on one server, run by the server that calls boards, and seen on a third."""
    assert one.active is not None
    place = Place(server=one.active, data=tmp_path / "one", folder=tmp_path, token=one.token)
    with place.board("cellar", config=config_of(tmp_path)) as board:
        echo = {"command": "/bin/echo", "args": ["from two"]}
        said = two.did("POST", f"/nodes/{board.number}/exec", echo)
        assert said["stdout"] == "from two\n", said
        seen = three.did("GET", f"/commands/{said['command_id']}")["data"]["outcomes"]
        assert [(one["node_id"], one["stdout"]) for one in seen] == [(board.number, "from two\n")]
        run = three.did("POST", "/exec", {**echo, "target": {"node_ids": [board.number]}})["command_id"]
        until(lambda: one.did("GET", f"/commands/{run}")["data"]["open"] == 0)
        (outcome,) = two.did("GET", f"/commands/{run}")["data"]["outcomes"]
        assert (outcome["success"], outcome["stdout"]) == (True, "from two\n"), outcome
        _pins(one, two, three, board.number)
        _live(two, three, board.number)
        _provisioning(one, two, three, board.number)
        _revoked(tmp_path / "one", two, three, board.number)


def _pins(one: Site, two: Site, three: Site, board: int) -> None:
    """Any server calls a board: what one has driven, another reads, and a reservation holds at all."""
    wanted = {"node_id": board, "pin_number": 27, "name": "horn", "direction": "output"}
    number = two.did("POST", "/gpio", wanted)["data"]["id"]
    everyone = [one, two, three]
    with ThreadPoolExecutor(len(everyone)) as threads:
        for race in range(RACES):
            levels = [race % 2, (race + 1) % 2, race % 2]
            writing = [
                threads.submit(site.did, "POST", f"/gpio/{number}/write", {"value": level})
                for site, level in zip(everyone, levels, strict=True)
            ]
            assert [one.result(DEADLINE_SECONDS)["value"] for one in writing] == levels
            wire = {site.did("POST", f"/gpio/{number}/read")["value"] for site in everyone}
            assert wire == {site.did("GET", f"/gpio/{number}")["data"]["value"] for site in everyone}
    until(lambda: len(three.did("GET", f"/gpio/{number}/readings")["readings"]) > 1)
    by_name = f"{two.web}/apis/v1/pins/cellar.27"
    acted = two.ask("POST", f"{by_name}/actions/write", {"value": 1})
    assert acted.status_code == 200, acted.text
    assert three.did("GET", by_name.replace(two.web, three.web))["spec"]["level"] == 1
    three.did("POST", f"/gpio/{number}/reserve", {"client_id": "crane"})
    assert (
        one.did("GET", "/gpio/reservations")["reservations"]
        == two.did("GET", "/gpio/reservations")["reservations"]
    )
    refused = two.ask("POST", f"/gpio/{number}/write", {"value": 1, "client_id": "rival"})
    assert refused.status_code == 409, refused.text
    two.did("POST", f"/gpio/{number}/write", {"value": 1, "client_id": "crane"})
    two.did("POST", f"/gpio/{number}/release", {"client_id": "crane"})
    one.did("DELETE", f"/gpio/{number}")


def _live(two: Site, three: Site, board: int) -> None:
    """What a board says when it is asked, at servers that stand by."""
    for site in (two, three):
        assert site.did("GET", f"/nodes/{board}/system")["data"]["node_id"] == board
        assert site.did("GET", f"/nodes/{board}/health")["data"]["node_id"] == board
        logs = site.ask("GET", f"/nodes/{board}/logs?tail=5&source=agent")
        assert (logs.status_code, "event: end" in logs.text) == (200, True), logs.text
        assert site.did("GET", "/health")["status"] == "ok"
        assert site.did("GET", "/system/info")["cpu_count"] > 0
        assert site.did("GET", "/system/services")["count"] == 0


def _provisioning(one: Site, two: Site, three: Site, board: int) -> None:
    """What is asked for at one server is carried out by the active one, and followed at a third."""
    nowhere = f"127.0.0.1:{free_port()}"
    host, port = nowhere.split(":")
    login = {"username": "pi", "port": int(port), "password": "x", "known_hosts": "* ssh-ed25519 AAAA"}
    two.did("PUT", "/credentials/default", login)
    assert three.did("GET", "/credentials")["count"] == 1
    order = {"addresses": {str(board): host}, "request_id": "look"}
    plan = three.did("POST", f"/nodes/{board}/check", {**order, "dry_run": True})
    assert [step["name"] for step in plan["steps"]] == ["preflight"]
    begun = [site.did("POST", f"/nodes/{board}/check", order)["operation_id"] for site in (three, two)]
    assert len(set(begun)) == 1
    log = two.ask("GET", f"/operations/{begun[0]}/log")
    assert "event: end" in log.text, log.text
    for site in (one, two, three):
        shown = site.did("GET", f"/operations/{begun[0]}")["data"]
        assert shown["finished"], shown
        assert shown["steps"][0]["state"] == "failed", shown
    assert three.did("POST", f"/operations/{begun[0]}/cancel")["message"] == "it was over already"
    two.did("DELETE", "/credentials/default")


def _revoked(data: Path, two: Site, three: Site, board: int) -> None:
    """Who is revoked at one server drives no pin at another, and a log that it follows there ends."""
    made = execute("tokens", "create", "guest", "--role", "operator", "--data-dir", str(data))
    assert made.code == 0, made.err
    guest = {"authorization": f"Bearer {made.out.strip().splitlines()[-1]}"}
    wanted = {"node_id": board, "pin_number": 22, "name": "gate", "direction": "output"}
    pin = f"/gpio/{two.did('POST', '/gpio', wanted)['data']['id']}"
    assert two.ask("POST", f"{pin}/write", {"value": 1}, guest).status_code == 200
    followed = f"/nodes/{board}/logs?follow=true&source=agent"
    with three.http.stream("GET", followed, headers=guest) as stream:
        assert stream.status_code == 200
        gone = execute("tokens", "revoke", "guest", "--data-dir", str(data))
        assert gone.code == 0, gone.err
        assert two.ask("POST", f"{pin}/write", {"value": 0}, guest).status_code == 401
        with suppress(httpx.NetworkError, httpx.RemoteProtocolError):  # it ends, or is cut off
            for _ in stream.iter_bytes():
                pass
    assert two.did("POST", f"{pin}/read")["value"] == 1
    three.did("DELETE", pin)


def _races(everyone: list[Site]) -> None:
    """Of boards and clusters that are made at all servers at once, names and numbers are those of one."""
    with ThreadPoolExecutor(len(everyone)) as threads:
        numbers: list[int] = []
        for race in range(RACES):
            answers = list(
                threads.map(lambda site: site.ask("POST", "/clusters", {"name": f"race{race}"}), everyone)  # noqa: B023
            )
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [201, 409, 409], [answer.text for answer in answers]
            numbers += [one.json()["id"] for one in answers if one.status_code == 201]
        others = list(
            threads.map(
                lambda at: at[0].did("POST", "/clusters", {"name": at[1]})["id"],
                zip(everyone * 2, [f"own{number}" for number in range(6)], strict=True),
            )
        )
        assert len({*numbers, *others}) == RACES + 6


@contextmanager
def _reporting(board: Certified, everyone: list[Site]) -> Iterator[Callable[[], int]]:
    """A board that reports to another server each time; yields how many reports were taken."""
    stop, taken = threading.Event(), list[int]()

    def report() -> None:
        with ExitStack() as stack:
            stubs = [
                boards_pb2_grpc.ControlPlaneStub(stack.enter_context(board.channel(site.boards)))
                for site in everyone
            ]
            for sequence in itertools.count(1):
                if stop.wait(REPORT_SECONDS):
                    return
                said = pb.HealthReport(id=board.number, boot_id="first", sequence=sequence)
                if _called(stubs[sequence % len(stubs)].ReportHealth, said) is not None:
                    taken.append(sequence)

    with ThreadPoolExecutor(1) as thread:
        reporting = thread.submit(report)
        try:
            until(lambda: len(taken) > 3 or reporting.done())
            yield lambda: len(taken)
        finally:
            stop.set()
        reporting.result(DEADLINE_SECONDS)


def _feed(site: Site, change: Callable[[], object]) -> None:
    """A live feed of a standby tells what is written on another one."""
    with connect(
        f"{site.web.replace('http', 'ws', 1)}/ws?v=events",
        additional_headers={"authorization": f"Bearer {site.token}"},
        open_timeout=DEADLINE_SECONDS,
    ) as socket:
        socket.send('{"type": "ping"}')
        while "pong" not in str(socket.recv(timeout=DEADLINE_SECONDS)):
            pass
        change()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while "told" not in str(socket.recv(timeout=DEADLINE_SECONDS)):
            assert time.monotonic() < deadline
