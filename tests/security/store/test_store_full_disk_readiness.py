"""A server whose disk is full says so to those who send it work."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.shared.server_process import running_server

SECONDS = 60.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def answers(address: str, status: int) -> str:
    """What `/readyz` says once it answers so."""
    deadline = time.monotonic() + SECONDS
    while (answer := httpx.get(address + "/readyz")).status_code != status:
        assert time.monotonic() < deadline, f"still {answer.status_code}: {answer.text}"
        time.sleep(0.1)
    return answer.text


def test_a_server_is_not_ready_while_its_disk_is_full_and_ready_again_afterwards(small_disk: Path) -> None:
    with running_server(small_disk, "--only", "gpus") as server:
        answers(server.web, 200)
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(64 * 1024))
            except OSError:
                pass
        assert answers(server.web, 503) == "the disk is full\n"
        assert httpx.get(server.web + "/healthz").status_code == 200, "alive: a restart would not help"
        ballast.unlink()
        # By itself: nobody sends writes to a server that is not ready.
        assert answers(server.web, 200) == "ok\n"
        assert server.stop() == 0
