"""The figures of rollouts can be measured. Nothing here looks at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_figures_of_rollouts_can_be_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick", "--only", "rollout_pass"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "A pass over a rollout of 10 targets" in done.stdout
    assert "A pass over a rollout of 100 targets" in done.stdout
