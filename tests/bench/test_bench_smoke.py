"""The figures' scripts run to their end and fill their rows. Nothing here looks at a time."""

from __future__ import annotations

import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "list_gpus": 1,
    "fan_out": 2,
    "fan_out_effort": 2,
    "durable_writes": 5,
    "registrations": 1,
}
"""One of each way of measuring, with its number of rows; the others are made of the same parts."""

DIFFERENCE = "Telling "
"""How the figures begin that are one time less another: of three updates, noise may be more than either."""

pytestmark = pytest.mark.skipif(
    shutil.which("h2load") is None or len(os.sched_getaffinity(0)) < 2,
    reason="the benchmarks need h2load and two cores",
)


def test_figures_can_be_measured() -> None:
    command = [sys.executable, str(ROOT / "bench" / "run.py"), "--quick"]
    for figure in ROWS:
        command += ["--only", figure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    # What grpc has to say of a connection that broke may stand between them.
    told = [line.removesuffix(" ...") for line in done.stderr.splitlines() if line.endswith(" ...")]
    assert told == list(ROWS)
    rows = [line for line in done.stdout.splitlines() if line.rstrip(" |").endswith("reached")]
    assert len(rows) == sum(ROWS.values())
    for row in rows:
        figure, ours = (cell.strip() for cell in row.split("|")[1:3])
        measured = float(ours.split()[0].removesuffix("/s").replace(",", ""))
        assert math.isfinite(measured)
        assert measured > 0 or figure.startswith(DIFFERENCE), row
    takes = re.findall(r"with the update itself ([\d.]+) ms, unwatched ([\d.]+) ms", done.stdout)
    assert len(takes) == ROWS["fan_out_effort"]
    assert all(float(each) > 0 for both in takes for each in both)


def test_whoever_did_anything_took_processor_time() -> None:
    """However little: rates are divided by it."""
    made = runpy.run_path(str(ROOT / "bench" / "servers.py"))["Server"]
    server = made(name="", pid=os.getpid(), host="", port=0, started_seconds=0.0)
    seen = [server.cpu_seconds() for _ in range(3)]
    assert seen == sorted(set(seen))
    assert seen[-1] == pytest.approx(time.process_time(), abs=1.0)


def test_the_table_is_written_between_the_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n")
    runpy.run_path(str(ROOT / "bench" / "run.py"))["_write"](page, "| new |")
    assert page.read_text() == "before\n<!-- figures -->\n| new |\n<!-- end of figures -->\nafter\n"


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no table here\n")
    with pytest.raises(SystemExit, match="has no <!-- figures -->"):
        runpy.run_path(str(ROOT / "bench" / "run.py"))["_write"](page, "| new |")
    assert page.read_text() == "no table here\n"
