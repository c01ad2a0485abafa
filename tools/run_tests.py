"""Run the suite, and once more what failed, alone: `run_tests.py [ARGUMENTS OF PYTEST]`.

A test that fails and then passes is listed as unstable, with its first failure. Up to two of them do not fail
the run; nothing else is forgiven.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

UNSTABLE_LIMIT = 2
"""More say that something is wrong with the product or the suite, not with the moment."""
LOOKS_LIMIT = 12
"""With more failures the run has failed whatever a second look tells."""
FAILED = Path(".pytest_cache/v/cache/lastfailed")
TESTS_FAILED = 1
"""The exit code of pytest for that; others say that it could not run, which no second look changes."""


def main(arguments: Sequence[str]) -> int:
    FAILED.unlink(missing_ok=True)
    code, summary = _run(arguments)
    if code != TESTS_FAILED:
        return code
    failed = sorted(json.loads(FAILED.read_text()))
    if len(failed) > LOOKS_LIMIT:
        print(f"{len(failed)} tests failed; a second look is taken at {LOOKS_LIMIT} at most", flush=True)
        return code
    unstable = []
    for test in failed:
        print(f"\nA second look at {test}", flush=True)
        again, _ = _run([test])
        if again == 0:
            unstable.append(test)
    if unstable:
        print("\nunstable: failed in the suite, passed alone", flush=True)
        for test in unstable:
            print(f"  {_first_failure(test, summary)}", flush=True)
    if len(unstable) < len(failed):
        return code
    if len(unstable) > UNSTABLE_LIMIT:
        print(f"{len(unstable)} unstable tests, and {UNSTABLE_LIMIT} are forgiven", flush=True)
        return code
    return 0


def _run(arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
    """The exit code of pytest, and the lines of its summary; everything is passed on as it is printed."""
    environment: Mapping[str, str] = {**os.environ, "COLUMNS": os.environ.get("COLUMNS", "200")}
    command = [sys.executable, "-m", "pytest", *arguments]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, errors="replace", env=environment
    ) as suite:
        assert suite.stdout is not None
        for line in suite.stdout:
            print(line, end="", flush=True)
            if line.startswith(("FAILED ", "ERROR ")):
                lines.append(line.rstrip())
    return suite.returncode, lines


def _first_failure(test: str, summary: Sequence[str]) -> str:
    return next((line for line in summary if f" {test}" in line), test)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
