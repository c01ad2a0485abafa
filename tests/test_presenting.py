"""A running server takes up another authority on every listener, without a restart."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.instances.instances_lab import TENANT, document
from support.shared.cli_runner import Outcome, execute
from support.shared.server_process import ServerProcess, running_server

from fleetplane.kernel.identity.certificates import peer_identity


def eventually(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    place = tmp_path / "data"
    place.mkdir(mode=0o700)
    objects = place / "objects" / "shard" / "local"
    objects.mkdir(parents=True)
    (objects / "config.jsonc").write_text(json.dumps(document(size=0)))
    return place


def renewed(server: ServerProcess) -> int:
    return sum(line.get("event") == "listener.renewed" for line in server.logged())


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_operators_go_through_a_succession_and_the_server_through_one_life(
    data_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "operator"
    with running_server(
        data_dir,
        "--only",
        "instances",
        "--set",
        "instances.advertise=listeners",
        "--set",
        "instances.provider=mock",
    ) as server:

        def instances(*arguments: str) -> Outcome:
            return execute("instances", *arguments)

        def ca(*arguments: str) -> Outcome:
            return instances("ca", *arguments, "--data-dir", str(data_dir))

        def groups() -> int:
            where = server.address("operator", "https://")
            asked = ("--address", where, "--identity-dir", str(folder), "--timeout", "60")
            done = instances("groups", "--tenant", TENANT, *asked)
            print(done.err)  # shown with a failure
            return done.code

        made = instances(
            "operator-identity", "--tenant", TENANT, "--output-dir", str(folder), "--data-dir", str(data_dir)
        )
        assert made.code == 0, made.err
        assert groups() == 0
        before = descriptors(server.pid)

        assert ca("rotate").code == 0
        eventually(lambda: renewed(server) == 3)
        assert groups() == 0, "nothing has changed for those who know only the first"
        trusted = ca("show").out
        assert ca("switch").code == 0
        eventually(lambda: renewed(server) == 6)
        assert groups() == 0, "the one that this operator knows vouches for the other"
        (folder / "ca.crt").write_text(trusted)
        assert groups() == 0, "its own certificate is of the first, and good"

        refused = ca("retire")
        assert (refused.code, "1 operator " in refused.err) == (6, True)
        assert ca("retire", "--force").code == 0
        eventually(lambda: renewed(server) == 9)
        assert groups() in (5, 8)
        shutil.rmtree(folder)
        again = instances(
            "operator-identity", "--tenant", TENANT, "--output-dir", str(folder), "--data-dir", str(data_dir)
        )
        assert again.code == 0
        assert groups() == 0
        signed = peer_identity((folder / "identity.crt").read_bytes()).issuer_key_id
        assert signed in ca("status").out
        eventually(lambda: descriptors(server.pid) <= before + 12)  # what was replaced is closed
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    with running_server(data_dir, "--only", "instances") as server:
        assert signed in execute("instances", "ca", "status", "--data-dir", str(data_dir)).out
        assert server.stop() == 0
