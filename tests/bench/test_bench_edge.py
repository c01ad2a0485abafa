"""The figures of edge daemons can be measured. Nothing here looks at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = [
    "Memory of a connected daemon, 6 of them",
    "Memory of a connected daemon, 12 of them",
    "Processor time of a verified heartbeat, against bare and Ed25519",
    "Processor time of a line of output, an event each, against bare",
    "Opening a stream, against a bare one",
    "12 daemons, a heartbeat every 30 s each",
    "One command to 6 daemons, first result",
    "One command to 6 daemons, last result",
]


@pytest.mark.skipif(
    shutil.which("h2load") is None or len(os.sched_getaffinity(0)) < 2,
    reason="the benchmarks need h2load and two cores",
)
def test_the_figures_of_edge_daemons_can_be_measured_in_plain_text_and_over_tls() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick", "--only", "edge_daemons"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.rstrip(" |").endswith("reached")]
    assert [row.split("|")[1].strip() for row in rows] == [
        f"{figure}, {transport}" for transport in ("plain", "TLS") for figure in FIGURES
    ]
