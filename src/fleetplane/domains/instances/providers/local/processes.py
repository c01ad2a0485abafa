"""Processes of this machine that are not our children: who they are, and how they end.

A process id alone proves nothing, because ids are used again. A process is ours if it also
started at the noted moment and carries our marker in its environment. All of this is read from
`/proc`, and all of it blocks (briefly, except for `end`): call it from a thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from fleetplane.domains.instances.providers.contract import ProviderError
from fleetplane.domains.instances.providers.local import launch

PROC = Path("/proc")
MARKER = "LOCAL_INSTANCE_DIRECTORY"
"""In the environment of every process of an instance; its value is the instance's directory."""

LAUNCH_LIMIT_SECONDS = 20.0
"""The launcher takes 20 ms; on a machine that swaps it may take seconds."""

NOTE_LIMIT_SECONDS = 10.0
"""From the launcher's end to the note of its fork: one write and one rename."""

EXEC_LIMIT_SECONDS = 1.0
"""For a process to become another program: it has no environment for a tenth of a millisecond then."""

POLL_SECONDS = 0.01
KILL_LIMIT_SECONDS = 5.0
"""How long the kernel may take to end what was killed; longer means uninterruptible I/O."""


R = TypeVar("R")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    start_ticks: int
    """Clock ticks from boot to its start: with the id, unique until the next boot."""


def start(directory: Path, command: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Run `command` in `directory`, as nobody's child. Once only: the directory remembers it."""
    launcher = [sys.executable, "-I", "-S", launch.__file__, str(directory), *command]
    try:
        done = subprocess.run(  # noqa: S603  # the operator's own command, no shell
            launcher,
            env={**environment, MARKER: str(directory)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=LAUNCH_LIMIT_SECONDS,
            start_new_session=True,  # Ctrl-C in the server's terminal is not for it
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError(f"cannot start {command[0]}: {error}") from error
    if done.returncode:
        raise ProviderError(f"cannot start {command[0]}: {done.stderr.decode(errors='replace').strip()}")
    process = wait_for(lambda: noted(directory), NOTE_LIMIT_SECONDS)
    if process is None:
        raise ProviderError(f"{command[0]} was started but left no trace in {directory}")
    return process


def noted(directory: Path) -> Process | None:
    """The process that was started in `directory`, dead or alive."""
    try:
        return msgspec.json.decode((directory / launch.PROCESS_FILE).read_bytes(), type=Process)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def is_alive(process: Process, directory: Path) -> bool:
    """Whether this very process lives, and not another with its number."""
    deadline = time.monotonic() + EXEC_LIMIT_SECONDS
    while (stat := _stat(process.pid)) is not None and stat.start_ticks == process.start_ticks:
        if (environment := _environment(process.pid)) or time.monotonic() >= deadline:
            return _is_marked(environment, directory)
        time.sleep(POLL_SECONDS)
    return False


def members(directory: Path, group: int | None = None) -> list[int]:
    """All living processes of the instance in `directory`: marked as such, or of its process group."""
    return [
        pid
        for pid in _all_pids()
        if (stat := _stat(pid)) is not None and (stat.group == group or _carries(pid, directory))
    ]


def end(directory: Path, process: Process | None, *, grace_seconds: float) -> None:
    """End all processes of an instance: asked first, killed after the grace. Raises if one stays."""
    # The group is trusted only while its leader is known to be ours: later the number may be anyone's.
    group = process.pid if process is not None and is_alive(process, directory) else None
    present = members(directory, group)
    _signal(present, signal.SIGTERM)
    if wait_for(lambda: not _alive(present), grace_seconds):
        present = members(directory)  # what was forked meanwhile
    deadline = time.monotonic() + KILL_LIMIT_SECONDS
    while present:
        if time.monotonic() > deadline:
            raise ProviderError(f"processes {sorted(present)} of {directory.name} do not end")
        _signal(present, signal.SIGKILL)
        wait_for(lambda seen=present: not _alive(seen), deadline - time.monotonic())  # type: ignore[misc]
        present = [*_alive(present), *members(directory)]


class _Stat(msgspec.Struct, frozen=True):
    group: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    """None for a process that is gone, or that only waits to be reaped."""
    try:
        text = (PROC / str(pid) / "stat").read_text("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else _Stat(group=int(fields[2]), start_ticks=int(fields[19]))


def _carries(pid: int, directory: Path) -> bool:
    return _is_marked(_environment(pid), directory)


def _environment(pid: int) -> bytes:
    """As it is in memory; empty for a kernel thread, and while a process becomes another program."""
    try:
        return (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
    except PermissionError:
        return b"another user's"


def _is_marked(environment: bytes, directory: Path) -> bool:
    return f"{MARKER}={directory}".encode() in environment.split(b"\0")


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in os.scandir(PROC) if entry.name.isdigit()]


def _alive(pids: Collection[int]) -> list[int]:
    return [pid for pid in pids if _stat(pid) is not None]


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def wait_for(condition: Callable[[], R], limit_seconds: float) -> R:
    """The first true answer of `condition`, or its last one when the time is up."""
    deadline = time.monotonic() + limit_seconds
    while not (answer := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return answer
