"""Running the command line in tests: in this process, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.shared import warm_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]

COMMAND = warm_start.COMMAND


def execute(
    *arguments: str,
    timeout_seconds: float = 60.0,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Outcome:
    """Run one command as its own process, to its end."""
    done = warm_start.run([*COMMAND, *arguments], timeout=timeout_seconds, env=environment, cwd=folder)
    return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)


def spawn(*arguments: str) -> subprocess.Popen[str]:
    """Start one command as its own process; the caller ends it."""
    environment = dict(os.environ)
    environment.pop("PYTHONUNBUFFERED", None)  # an unbuffered stdout loses the rest of a short write
    return warm_start.started(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
