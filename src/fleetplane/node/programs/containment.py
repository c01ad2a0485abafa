"""What a program of others may do on this machine: as whom it runs, its limits, and what may outlive it."""

from __future__ import annotations

import os
import pwd
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleetplane.kernel.errors import SettingsError

TERM_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramUser:
    """The user that a program runs as."""

    uid: int | None = None
    """None for the agent's own user."""
    gid: int = 0
    home: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Limits of one program and everything it starts; 0 for none. A core file is never written."""

    processes: int = 0
    """On top of the tasks that the user has already; Linux does not count root's."""
    address_space_bytes: int = 0
    data_bytes: int = 0
    cpu_seconds: int = 0
    file_bytes: int = 0
    """Of a file that it writes."""
    open_files: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """The safe choice by default: the program gains no privileges, and nothing of it outlives it."""

    account: ProgramUser = field(default_factory=ProgramUser)
    no_new_privileges: bool = True
    """Programs with the set-user-id bit, such as sudo, have no effect."""
    may_detach: bool = False
    """What made a session of its own is left alone when the program ends or is ended."""
    limits: ResourceLimits = field(default_factory=ResourceLimits)
    umask: int | None = 0o077
    """None leaves the agent's."""
    term_seconds: float = TERM_SECONDS
    """Between TERM and KILL."""


def account(run_as: str) -> ProgramUser:
    """The account of the user that an agent that is root runs programs as; otherwise the agent's own."""
    if os.geteuid() != 0:
        own = pwd.getpwuid(os.geteuid())
        return ProgramUser(uid=None, home=own.pw_dir or "/")
    try:
        found = pwd.getpwnam(run_as)
    except KeyError:
        raise SettingsError(f"there is no user {run_as!r} to run commands as", field="run_as") from None
    home = found.pw_dir if Path(found.pw_dir).is_dir() else "/"
    return ProgramUser(uid=found.pw_uid, gid=found.pw_gid, home=home)


def resource_limits(containment: Containment) -> dict[str, int]:
    """The limits by the names of the `resource` module, none above the agent's own. Blocking."""
    wanted, found = containment.limits, {"RLIMIT_CORE": 0}
    processes = 0
    if wanted.processes:
        own = containment.account.uid
        processes = wanted.processes + tasks_of(os.geteuid() if own is None else own)
    for name, limit in (
        ("RLIMIT_NPROC", processes),
        ("RLIMIT_AS", wanted.address_space_bytes),
        ("RLIMIT_DATA", wanted.data_bytes),
        ("RLIMIT_CPU", wanted.cpu_seconds),
        ("RLIMIT_FSIZE", wanted.file_bytes),
        ("RLIMIT_NOFILE", wanted.open_files),
    ):
        if limit:
            hard = resource.getrlimit(getattr(resource, name))[1]
            found[name] = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    return found


def tasks_of(uid: int) -> int:
    """Count the tasks of a user: the kernel's limit counts all of them together. Blocking."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += sum(1 for _ in (entry / "task").iterdir())
    return count
