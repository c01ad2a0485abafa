"""NGINX's processes as /proc shows them: who is the master, which workers take connections.

A number in a file proves nothing: the process may be gone and its number another's. A master is
only one whose title names our configuration.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.agent.nginx.confirmation import NginxWorker

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
    title = title_of(proc, pid)
    if not title.startswith(_MASTER) or str(config) not in title:
        return None
    started = started_at(proc, pid)
    return None if started is None else Master(pid=pid, started=started)


def workers(master: Master, *, proc: Path = PROC) -> frozenset[NginxWorker]:
    """Those that take connections."""
    return frozenset(
        NginxWorker(pid, started)
        for pid in _children(proc, master.pid)
        if (title := title_of(proc, pid)).startswith(_WORKER) and _LEAVING not in title
        if (started := started_at(proc, pid)) is not None
    )


def orphans(logs: Path, *, known: Collection[NginxWorker] = (), proc: Path = PROC) -> list[int]:
    """Workers whose master was killed: they serve on, hold its ports, and obey nobody else.

    Their title does not say whose they are. That we knew them does, or that they write into our logs;
    and where the kernel does not show us the files of another user's process, that they live in our service's
    control group.
    """
    return [
        pid
        for pid in _numbers(proc)
        if title_of(proc, pid).startswith(_WORKER)
        and not title_of(proc, _parent(proc, pid)).startswith(_MASTER)
        and _is_ours(proc, pid, logs, known)
    ]


def _is_ours(proc: Path, pid: int, logs: Path, known: Collection[NginxWorker]) -> bool:
    if (started := started_at(proc, pid)) is not None and NginxWorker(pid, started) in known:
        return True
    try:
        files = [link.readlink() for link in (proc / str(pid) / "fd").iterdir()]
    except PermissionError:
        return (group := control_group(proc, str(pid))) != "" and group == control_group(proc, "self")
    except OSError:
        return False  # just gone
    return any(target.is_relative_to(logs) for target in files)


def control_group(proc: Path, pid: str) -> str:
    """Empty where there is none of its own: everything on the machine would be in it."""
    try:
        paths = [line.rpartition(":")[2] for line in (proc / pid / "cgroup").read_text().splitlines()]
    except OSError:
        return ""
    return next((path for path in paths if path.endswith(".service")), "")


def _numbers(proc: Path) -> list[int]:
    return [int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal()]


def _parent(proc: Path, pid: int) -> int:
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def title_of(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def started_at(proc: Path, pid: int) -> int | None:
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
