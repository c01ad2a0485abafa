"""The instances' figures can be measured. Nothing here looks at a time."""

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
def test_the_instances_figures_can_be_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick"]
    for figure in ("instances_pass", "instances_agents"):
        command += ["--only", figure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.rstrip(" |").endswith("reached")]
    assert [row.split("|")[1].strip().split(",")[0] for row in rows] == [
        "A pass over a group of 10",
        "A pass over a group of 100",
        "A group from 0 to 20",
        "Registrations",
        "20 agents reporting every 2 s",
    ]
