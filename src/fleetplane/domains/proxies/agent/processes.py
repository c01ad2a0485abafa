"""NGINX's processes as /proc shows them: who is the master, which workers take connections.

A number in a file proves nothing: the process may be gone and its number another's. A master is
only one whose title names our configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.agent.confirmation import Worker

_MASTER: Final = "nginx: master process"
_WORKER: Final = "nginx: worker process"
_LEAVING: Final = "shutting down"
PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    pid: int
    started: int
    """In ticks since the machine started."""


def find_master(pid_file: Path, config: Path, *, proc: Path = PROC) -> Master | None:
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return None  # `nginx -t` leaves an empty file where none was
    title = _title(proc, pid)
    if not title.startswith(_MASTER) or str(config) not in title:
        return None
    started = _started(proc, pid)
    return None if started is None else Master(pid=pid, started=started)


def workers(master: Master, *, proc: Path = PROC) -> frozenset[Worker]:
    """Those that take connections."""
    return frozenset(
        Worker(pid, started)
        for pid in _children(proc, master.pid)
        if (title := _title(proc, pid)).startswith(_WORKER) and _LEAVING not in title
        if (started := _started(proc, pid)) is not None
    )


def _title(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _started(proc: Path, pid: int) -> int | None:
    try:
        after_name = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] == "Z" else int(after_name[19])
    except (OSError, ValueError, IndexError):
        return None


def _children(proc: Path, pid: int) -> list[int]:
    try:
        return [
            int(child) for child in (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
        ]
    except FileNotFoundError:
        return _children_by_search(proc, pid)  # a kernel without that file, or the master is gone
    except OSError:
        return []


def _children_by_search(proc: Path, pid: int) -> list[int]:
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(entry.name))
    return found
