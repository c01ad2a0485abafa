"""The second look at tests that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "run_tests.py"
FLAKY = """
from pathlib import Path

def test_flaky_{name}():
    mark = Path("{name}")
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time, {name}")
"""


def run(folder: Path, *bodies: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text("\n".join(bodies) + "\ndef test_good():\n    assert True\n")
    command = [sys.executable, str(SCRIPT), "-q", "-ra", "-p", "no:xdist"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def flaky(*names: str) -> list[str]:
    return [FLAKY.format(name=name) for name in names]


def test_what_passes_alone_is_listed_with_its_first_failure_and_forgiven(tmp_path: Path) -> None:
    ran = run(tmp_path, *flaky("a", "b"))

    assert ran.returncode == 0, ran.stdout
    _, _, told = ran.stdout.partition("unstable: failed in the suite, passed alone\n")
    assert [line.split(" - ") for line in told.splitlines()] == [
        ["  FAILED test_it.py::test_flaky_a", "AssertionError: the first time, a"],
        ["  FAILED test_it.py::test_flaky_b", "AssertionError: the first time, b"],
    ]


@pytest.mark.parametrize(
    "bodies",
    [
        [*flaky("a"), "def test_bad():\n    assert False\n"],
        flaky("a", "b", "c"),
        ["import nothing_of_that_name\n"],
    ],
    ids=["fails again", "three unstable", "cannot be collected"],
)
def test_everything_else_fails_the_run(tmp_path: Path, bodies: list[str]) -> None:
    assert run(tmp_path, *bodies).returncode != 0
