"""A real server with a bus that refuses it: it serves, and says which setting is wrong."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

from support.shared import nats_server
from support.shared.postgres_server import PostgresServer
from support.shared.server_process import START_SECONDS, running_server
from support.shared.waiting_server import patient

PATIENT = """
from fleetplane.kernel.store.notifiers import nats

nats.CONNECT_SECONDS = 60
"""
"""Only why the bus is away first is logged: it must not be that this process was held up."""


def page(web: str, path: str) -> str:
    with urllib.request.urlopen(f"{web}{path}", timeout=START_SECONDS) as answer:
        assert answer.status == 200
        return str(answer.read().decode())


def test_a_bus_that_refuses_the_server_does_not_keep_it_from_serving(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with nats_server.running(tmp_path, "authorization { token: right }") as nats:
        environment = {
            **patient(more=PATIENT, folder=tmp_path),
            "FLEETPLANE_STORE__URL": postgres.database(),
            "FLEETPLANE_BUS__URL": nats.url,
            "FLEETPLANE_BUS__TOKEN": "wrong-one",
        }
        with running_server(tmp_path / "one", "--only", "gpus", environment=environment) as server:
            (web,) = server.listeners["web"]
            deadline = time.monotonic() + START_SECONDS
            while "bus.token: refused" not in server.log.read_text():
                assert time.monotonic() < deadline, server.log.read_text()
                time.sleep(0.05)
            page(web, "/readyz")
            assert "fleetplane_bus_connected 0.0" in page(web, "/metrics")
            told = server.log.read_text()
            assert told.count("bus.away") == 1
            assert "wrong-one" not in told
