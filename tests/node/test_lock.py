"""One process at a time in a folder."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetplane.kernel.errors import SettingsError
from fleetplane.node.lock import Occupied, sole_user

HOLD = """
import sys
from pathlib import Path
from fleetplane.node.lock import sole_user
with sole_user(Path(sys.argv[1]), whose="another agent"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(file: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            yield holder
        finally:
            holder.kill()


def test_who_comes_second_is_told_who_is_there_and_a_killed_holder_lets_go(tmp_path: Path) -> None:
    file = tmp_path / "agent.lock"
    with held(file) as holder:
        why = f"another agent .process {holder.pid}. works in"
        with pytest.raises(Occupied, match=why) as caught, sole_user(file, whose="another agent"):
            pass
        assert caught.value.pid == holder.pid
        assert caught.value.details["cause"] == "lock"
    with sole_user(file, whose="another agent"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_holder_that_leaves_in_time_is_waited_for(tmp_path: Path) -> None:
    file, taken = tmp_path / "agent.lock", threading.Event()

    def wait() -> None:
        with sole_user(file, whose="another agent", wait_seconds=60):
            taken.set()

    with held(file) as holder:
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not taken.wait(0.3)
        assert holder.stdin is not None
        holder.stdin.close()  # it ends by itself
        waiting.join(timeout=60)
    assert taken.is_set()


def test_a_lock_file_is_no_way_to_write_elsewhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"content")
    (file := tmp_path / "agent.lock").symlink_to(victim)
    with pytest.raises(SettingsError, match="cannot be used"), sole_user(file, whose="another agent"):
        pass
    assert victim.read_bytes() == b"content"


def test_a_holder_that_left_no_number_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "agent.lock"
    with sole_user(file, whose="another agent"):
        file.write_bytes(b"?")
        with pytest.raises(Occupied) as caught, sole_user(file, whose="another agent"):
            pass
    assert caught.value.pid == 0
