"""The boards' figures can be measured. Nothing here looks at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    shutil.which("h2load") is None or len(os.sched_getaffinity(0)) < 2,
    reason="the benchmarks need h2load and two cores",
)
def test_the_boards_figures_can_be_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick", "--only", "boards_fleet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.rstrip(" |").endswith("reached")]
    assert [row.split("|")[1].strip().split(",")[0] for row in rows] == [
        "20 boards join",
        "20 boards reporting every 2 s",
        "And their logs followed over REST",
        "Lines missing without a word",
        "A pin driven over REST",
        "REST",
        "From a pin driven to its event on a WebSocket",
        "Memory of the server",
    ]
    lost = next(line for line in done.stdout.splitlines() if line.startswith("Lines missing without a word"))
    assert " 0 lines made" not in lost
    assert " 0 told to be dropped" not in lost, "some were to be dropped, to see that it is told"
