"""Agents of instances that are connected to a server that stands by have everything they have elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.instances.agent_at_standby import agent_at_standby
from support.shared.cli_runner import execute
from support.shared.postgres_server import PostgresServer


@pytest.mark.timeout(600)
def test_an_agent_at_a_standby_gets_its_files_and_is_heard_by_all(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    with agent_at_standby(tmp_path, postgres) as place:
        environment_file = place.received("worker.env")
        place.received("worker.crt")
        assert "blue" in environment_file.read_text()
        place.all_know_that_it_is_well()
        place.until(lambda: _was_heard(place.data))
        place.configure("green")
        place.until(lambda: "green" in environment_file.read_text())


def _was_heard(data: Path) -> bool:
    """Whether the active server knows of a report, all of which went to the other one."""
    listed = execute("instances", "list", "--data-dir", str(data), "-o", "json")
    assert listed.code == 0, listed.err
    return any(item["last_seen"] for item in json.loads(listed.out))
