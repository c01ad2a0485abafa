"""What agents load can be measured, and stays within a bound."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AGENTS = ["instance", "proxy", "edge", "gpu", "board"]
IMPORTS_LIMIT_MB = {"instance": 50.0, "gpu": 50.0}
"""Eight more than they take: a library that comes back, such as cryptography or rich, is noticed."""


def test_the_memory_of_what_agents_import_can_be_measured_and_is_bounded() -> None:
    command = [sys.executable, str(ROOT / "bench" / "agent_memory.py"), "--imports-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert rows[0] == ["MB", *AGENTS]
    table = {row[0]: dict(zip(AGENTS, row[1:], strict=True)) for row in rows[2:]}
    assert "rich" not in table
    for agent, limit in IMPORTS_LIMIT_MB.items():
        assert 20.0 < float(table["all imports"][agent]) < limit
