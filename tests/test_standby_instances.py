"""Agents of instances that are connected to a server that stands by have everything they have elsewhere."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.shared.cli_runner import execute
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import running_server
from support.shared.waiting_server import WaitingServer, patient

ONLY = ("--only", "instances")
DEADLINE_SECONDS = 60.0
EXAMPLE = Path(__file__).parents[1] / "docs" / "examples" / "instances" / "local.jsonc"


@pytest.mark.timeout(600)
def test_an_agent_at_a_standby_gets_its_files_and_is_heard_by_all(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    document = tmp_path / "objects" / "shard" / "local" / "config.jsonc"
    environment = {
        **patient(reads=True),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
        "FLEETPLANE_INSTANCES__DIRECTORY": str(tmp_path / "objects"),
    }
    web, registration, agent = (f"127.0.0.1:{free_port()}" for _ in range(3))
    places = {"web": web, "registration": registration, "agent": agent}
    at = [word for name, place in places.items() for word in ("--set", f"listeners.{name}.addresses={place}")]
    one_data = tmp_path / "one"
    with running_server(one_data, *ONLY, environment=environment) as one:
        made = execute("tokens", "create", "viewer", "--role", "viewer", "--data-dir", str(one_data))
        assert made.code == 0, made.err
        bearer = {"authorization": f"Bearer {made.out.strip().splitlines()[-1]}"}
        with WaitingServer(tmp_path / "two", environment, *ONLY, *at) as two:
            two.until(lambda: "standby.reads_served" in two.told())
            # Only now is there something to do, and all of it leads the agent to the standby.
            document.parent.mkdir(parents=True)
            document.write_text(_document(registration, agent))
            _refresh(one_data)
            folder = one_data / "instances"
            environment_file, _ = (
                _until(partial(_received, folder, name), lambda: str(list(folder.rglob("*"))))
                for name in ("worker.env", "worker.crt")
            )
            assert "blue" in environment_file.read_text()
            for server in (one.web, f"http://{web}"):
                _until(partial(_is_well, server, bearer), lambda: two.told()[-2000:])
            _until(lambda: _was_heard(one_data), lambda: two.told()[-2000:])
            document.write_text(_document(registration, agent).replace("blue", "green"))
            _refresh(one_data)
            _until(lambda: "green" in environment_file.read_text(), lambda: two.told()[-2000:])


def _document(registration: str, agent: str) -> str:
    """One instance, which is told the addresses of one server."""
    text = EXAMPLE.read_text().replace('"size": 2', '"size": 1')
    head, advertise, rest = text.partition('"advertise": {')
    rest = rest.replace("127.0.0.1:8992", registration, 1).replace("127.0.0.1:8994", agent, 1)
    return head + advertise + rest


def _received(folder: Path, name: str) -> Path | None:
    """The file of that name in the folder of the instance; what is not whole yet lies beside it."""
    return next((found for found in folder.rglob(name) if found.parent.name == "recv"), None)


def _refresh(data: Path) -> None:
    done = execute("instances", "config", "refresh", "--data-dir", str(data))
    assert done.code == 0, done.err


def _is_well(server: str, bearer: dict[str, str]) -> bool:
    answer = httpx.get(f"{server}/apis/v1/instances", headers=bearer, timeout=DEADLINE_SECONDS)
    if answer.status_code != 200:
        return False
    items: list[Any] = answer.json()["items"]
    shown = httpx.get(
        f"{server}/v1/instances/instances",
        headers={**bearer, "x-tenant-id": "default"},
        timeout=DEADLINE_SECONDS,
    )
    assert shown.status_code == 200, shown.text
    return (
        [item["status"]["health"] for item in items],
        [one["health"] for one in shown.json()["items"]],
    ) == (
        ["ok"],
        ["healthy"],
    )


def _was_heard(data: Path) -> bool:
    """Whether the active server knows of a report, all of which went to the other one."""
    listed = execute("instances", "list", "--data-dir", str(data), "-o", "json")
    assert listed.code == 0, listed.err
    return any(item["last_seen"] for item in json.loads(listed.out))


def _until(found: Callable[[], Any], why: Callable[[], str]) -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (answer := found()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)
    return answer
