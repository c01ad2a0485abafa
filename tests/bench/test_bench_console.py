"""The figures of the console can be measured, in a real browser. Nothing here looks at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.shared.browser_rig import needs_chromium

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    needs_chromium,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the benchmarks need two cores"),
]


@pytest.mark.timeout(400)
def test_the_figures_of_the_console_can_be_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick", "--only", "console"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for figure in ("From a change to the screen, 16 rows", "Heap of the page, 16 rows"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"| {figure}")]
        assert float(row.split("|")[2].split()[0]) >= 0
    assert "| Frame of 16 rows, 200 changes a second" in done.stdout
