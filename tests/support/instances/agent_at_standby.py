"""Two servers on one PostgreSQL, and an agent of an instance that knows only the one that stands by."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from support.shared.cli_runner import execute
from support.shared.free_ports import free_port
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import running_server
from support.shared.waiting_server import WaitingServer, patient

from fleetplane.domains.instances.providers.local import launch, processes

ONLY = ("--only", "instances")
DEADLINE_SECONDS = 60.0
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "instances" / "local.jsonc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    data: Path
    """Of the server that is active."""
    standby: WaitingServer
    registration: str
    agent: str
    operator: str
    """Listeners of the standby."""
    active_operator: str
    servers: tuple[str, str]
    """Web addresses: the active one, the standby."""
    bearer: dict[str, str]
    document: Path

    @property
    def standby_data(self) -> Path:
        return self.data.with_name("two")

    @property
    def folder(self) -> Path:
        """Where instances are."""
        return self.data / "instances"

    def configure(self, colour: str) -> None:
        self.document.parent.mkdir(parents=True, exist_ok=True)
        self.document.write_text(self._text().replace("blue", colour))
        done = execute("instances", "config", "refresh", "--data-dir", str(self.data))
        assert done.code == 0, done.err

    def _text(self) -> str:
        """One instance, which is told the addresses of one server."""
        text = EXAMPLE.read_text().replace('"size": 2', '"size": 1')
        head, advertise, rest = text.partition('"advertise": {')
        rest = rest.replace("127.0.0.1:8992", self.registration, 1).replace("127.0.0.1:8994", self.agent, 1)
        return head + advertise + rest

    def received(self, name: str) -> Path:
        """The file of that name in the folder of the instance; what is not whole yet lies beside it."""

        def find() -> Path | None:
            return next((found for found in self.folder.rglob(name) if found.parent.name == "recv"), None)

        found: Path = self.until(find, lambda: str(list(self.folder.rglob("*"))))
        return found

    def all_know_that_it_is_well(self) -> None:
        for server in self.servers:
            self.until(partial(self._is_well, server))

    def _is_well(self, server: str) -> bool:
        answer = httpx.get(f"{server}/apis/v1/instances", headers=self.bearer, timeout=DEADLINE_SECONDS)
        if answer.status_code != 200:
            return False
        items: list[Any] = answer.json()["items"]
        shown = httpx.get(
            f"{server}/v1/instances/instances",
            headers={**self.bearer, "x-tenant-id": "default"},
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

    def until(self, found: Callable[[], Any], why: Callable[[], str] | None = None) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (answer := found()):
            assert time.monotonic() < deadline, why() if why is not None else self.standby.told()[-2000:]
            time.sleep(0.05)
        return answer


@contextmanager
def _ending_instances_of(data: Path) -> Iterator[None]:
    """They are nobody's children, and outlive a server that is killed."""
    try:
        yield
    finally:
        for note in (data / "instances").rglob(launch.PROCESS_FILE):
            processes.end(note.parent, processes.noted(note.parent), grace_seconds=0.0)


@contextmanager
def agent_at_standby(folder: Path, postgres: PostgresServer, *, more: str = "") -> Iterator[Place]:
    """`more` is what servers and agents begin with."""
    environment = {
        **patient(folder, reads=True, more=more),
        "FLEETPLANE_STORE__URL": postgres.database(),
        "FLEETPLANE_IDENTITY__MASTER_KEY": base64.b64encode(secrets.token_bytes(32)).decode(),
        "FLEETPLANE_INSTANCES__DIRECTORY": str(folder / "objects"),
    }
    web, registration, agent, operator = (f"127.0.0.1:{free_port()}" for _ in range(4))
    places = {"web": web, "registration": registration, "agent": agent, "operator": operator}
    at = [word for name, place in places.items() for word in ("--set", f"listeners.{name}.addresses={place}")]
    data = folder / "one"
    with _ending_instances_of(data), running_server(data, *ONLY, environment=environment) as one:
        made = execute("tokens", "create", "viewer", "--role", "viewer", "--data-dir", str(data))
        assert made.code == 0, made.err
        with WaitingServer(folder / "two", environment, *ONLY, *at) as two:
            two.until(lambda: "standby.reads_served" in two.told())
            found = Place(
                data=data,
                standby=two,
                registration=registration,
                agent=agent,
                operator=operator,
                active_operator=one.listeners["operator"][0].removeprefix("https://"),
                servers=(one.web, f"http://{web}"),
                bearer={"authorization": f"Bearer {made.out.strip().splitlines()[-1]}"},
                document=folder / "objects" / "shard" / "local" / "config.jsonc",
            )
            # Only now is there something to do, and all of it leads the agent to the standby.
            found.configure("blue")
            yield found
