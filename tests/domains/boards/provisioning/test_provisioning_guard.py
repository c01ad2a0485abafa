"""The lock on a board, by a real shell: who may run commands there, of several servers."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from fleetplane.domains.boards.fences import Fence
from fleetplane.domains.boards.provisioning.steps import BUSY, OVERTAKEN, guarded

SECONDS = 60.0


def command(
    folder: Path, revision: int, text: str, *, lineage: str = "l", wait: float = SECONDS
) -> list[str]:
    fence = Fence(lineage=lineage, revision=revision)
    mark = str(folder / "a mark")
    return ["sh", "-c", guarded(text, fence=fence, operation="op", mark=mark, wait_seconds=wait)]


def run(folder: Path, revision: int, text: str, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, revision, text, **more),  # type: ignore[arg-type]
        input="from stdin",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_a_command_is_run_as_it_is(tmp_path: Path) -> None:
    done = run(tmp_path, 7, "cat; echo 'it''s \"this\"' $((1+1)); umask; echo oops >&2; exit 5")
    plain = subprocess.run(["sh", "-c", "umask"], capture_output=True, text=True, check=True).stdout
    assert (done.returncode, done.stderr) == (5, "oops\n")
    assert done.stdout == f'from stdinits "this" 2\n{plain}'
    assert (tmp_path / "a mark").read_text() == "l 7 op\n"
    assert (tmp_path / "a mark.lock").stat().st_mode & 0o077 == 0


def test_an_older_owner_does_nothing_any_more(tmp_path: Path) -> None:
    assert run(tmp_path, 7, "true").returncode == 0
    late = run(tmp_path, 6, f"touch '{tmp_path}/late'")
    assert (late.returncode, late.stdout) == (OVERTAKEN, "")
    assert not (tmp_path / "late").exists()
    assert run(tmp_path, 7, "true").returncode == 0  # one owner runs several commands
    assert run(tmp_path, 6, "true", lineage="restored").returncode == 0
    assert run(tmp_path, 10**18, "true", lineage="restored").returncode == 0


@pytest.mark.parametrize(
    "text", ["", "\n", "l", "l seven op\n", "x" * 5000, "l 99999999999999999999999 op\n"]
)
def test_a_mark_that_cannot_be_read_keeps_nobody_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "a mark").write_text(text)
    assert run(tmp_path, 7, "true").returncode == 0
    assert (tmp_path / "a mark").read_text() == "l 7 op\n"


def test_a_newer_owner_waits_for_what_an_older_one_still_runs(tmp_path: Path) -> None:
    begun, go, order = (tmp_path / name for name in ("begun", "go", "order"))
    text = (
        f"echo one >> {order}; touch {begun}; while [ ! -e {go} ]; do sleep 0.05; done; echo two >> {order}"
    )
    with subprocess.Popen(command(tmp_path, 6, text)) as old:
        while not begun.exists():
            assert old.poll() is None
            time.sleep(0.01)
        assert run(tmp_path, 7, f"echo impatient >> {order}", wait=0).returncode == BUSY
        with subprocess.Popen(command(tmp_path, 7, f"echo three >> {order}")) as new:
            go.touch()
            assert (old.wait(SECONDS), new.wait(SECONDS)) == (0, 0)
    assert order.read_text().split() == ["one", "two", "three"]


def test_what_a_command_leaves_running_does_not_keep_the_lock(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert run(tmp_path, 6, f"sleep 300 </dev/null >/dev/null 2>&1 & echo $! > {pid}").returncode == 0
    try:
        assert run(tmp_path, 7, "true", wait=0).returncode == 0
    finally:
        subprocess.run(["kill", pid.read_text().strip()], check=True)
