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


def orphans(logs: Path, *, proc: Path = PROC) -> list[int]:
    """Workers whose master was killed: they serve on, hold its ports, and obey nobody else.

    Their title does not say whose they are; that they write into our logs does.
    """
    return [
        pid
        for pid in _numbers(proc)
        if _title(proc, pid).startswith(_WORKER)
        and not _title(proc, _parent(proc, pid)).startswith(_MASTER)
        and any(target.is_relative_to(logs) for target in _open_files(proc, pid))
    ]


def _open_files(proc: Path, pid: int) -> list[Path]:
    try:
        return [link.readlink() for link in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        return []  # somebody else's, or just gone


def _numbers(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]


def _parent(proc: Path, pid: int) -> int:
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


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
        # A kernel without that file, or the master is gone.
        return [child for child in _numbers(proc) if _parent(proc, child) == pid]
    except OSError:
        return []
