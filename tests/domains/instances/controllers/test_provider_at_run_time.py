"""A configuration that names a provider which cannot be had."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from support.instances.instances_lab import CONFIG_PATH, TENANT, document
from support.shared import warm_start
from support.shared.server_process import ServerProcess, running_server

ONLY = ("--only", "instances", "--set", "instances.advertise=listeners")
WAIT_SECONDS = 60.0


def configure(data: Path, wanted: dict[str, Any]) -> None:
    path = data / "objects" / CONFIG_PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted))


def of_provider(kind: str, **options: Any) -> dict[str, Any]:
    infra = {"provider": kind, "region": "here", "zone": "here-a", "options": options}
    return document(shard={"infra": infra})


def unusable() -> dict[str, Any]:
    """A provider that this server's settings keep from starting, which the document alone cannot tell."""
    return of_provider("local", environment={"COLOUR": "blue"})


def fleetplane(data: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*warm_start.COMMAND, "instances", *arguments, "--data-dir", str(data)]
    return warm_start.run(command, timeout=60)


def until_logged(server: ServerProcess, event: str) -> dict[str, object]:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for line in server.logged():
            if line["event"] == event:
                return line
        time.sleep(0.05)
    raise AssertionError(f"{event} was not logged: {server.log.read_text()}")


def test_a_running_server_says_so_and_takes_the_next_document(tmp_path: Path) -> None:
    with running_server(tmp_path, *ONLY) as server:
        configure(tmp_path, of_provider("google"))
        refused = fleetplane(tmp_path, "config", "refresh", "--tenant", TENANT)
        assert refused.returncode == 2
        assert "must be one of aws, local, mock" in refused.stderr
        configure(tmp_path, unusable())
        assert fleetplane(tmp_path, "config", "refresh", "--tenant", TENANT).returncode == 0
        assert "'COLOUR'" in str(until_logged(server, "instances.provider_unusable"))
        assert server.process.poll() is None
        command = [*warm_start.COMMAND, "explain", f"{TENANT}/workers", "--data-dir", str(tmp_path)]
        why = warm_start.run(command, timeout=60).stdout
        assert "provider" in why
        assert "'COLOUR'" in why, "why the group has no instances"

        configure(tmp_path, of_provider("mock"))
        assert fleetplane(tmp_path, "config", "refresh", "--tenant", TENANT).returncode == 0
        assert until_logged(server, "instances.started")["provider"] == "mock"
        assert server.stop() == 0


def test_a_server_that_is_started_with_it_says_so_and_serves_everyone_else(tmp_path: Path) -> None:
    configure(tmp_path, unusable())
    with running_server(tmp_path, *ONLY) as server:
        assert "'COLOUR'" in str(until_logged(server, "instances.provider_unusable"))
        assert server.process.poll() is None

        configure(tmp_path, of_provider("mock"))
        assert fleetplane(tmp_path, "config", "refresh", "--tenant", TENANT).returncode == 0
        assert until_logged(server, "instances.started")["provider"] == "mock"
        assert server.stop() == 0
