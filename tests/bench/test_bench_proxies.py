"""The proxies' figures can be measured. Nothing here looks at a time."""

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
def test_the_figures_of_rest_and_logs_can_be_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick"]
    for figure in ("proxies_rest", "proxies_logs"):
        command += ["--only", figure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.rstrip(" |").endswith("reached")]
    assert [row.split("|")[1].strip().split(",")[0] for row in rows] == [
        "GET of a virtual host",
        "Durable PATCH of virtual hosts",
        "Access log lines taken from 4 agents",
        "Access log lines taken",
        "An hour of access log",
    ]
