"""Running the command line in tests: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]

COMMAND = [sys.executable, "-m", "fleetplane.cli.main"]


def execute(*arguments: str, timeout_seconds: float = 60.0) -> Outcome:
    """Run one command as its own process, to its end."""
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start one command as its own process; the caller ends it."""
    environment = dict(os.environ)
    environment.pop("PYTHONUNBUFFERED", None)  # an unbuffered stdout loses the rest of a short write
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
