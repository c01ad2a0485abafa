"""What a program of others may do on this machine: its user, its limits, and its guard.

The guard (`command_guard.py`) is a process of its own for each program: it becomes the parent of all that
the program leaves behind, also of what made a session of its own, and ends that with it. Told to end by
TERM it ends everything politely, then not; a second TERM means now.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import pwd
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
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


GUARD: Final = Path(__file__).with_name("command_guard.py")
STATUS_LIMIT_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program with its arguments. No shell: nothing in them is expanded or split."""

    path: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str = "/"
    stdin: bytes = b""


async def start(
    program: Program,
    containment: Containment,
    *,
    limits: Mapping[str, int],
    status: int,
    stdout: int,
    stderr: int,
) -> asyncio.subprocess.Process:
    """Start the guard with its program; `status` is where it says how that ended.

    Cancelled, neither is there. `limits` go by the names of the `resource` module.
    """
    with ExitStack() as passed:
        described = in_memory(_encoded(program, containment, limits))
        passed.callback(os.close, described)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(GUARD),
            str(status),
            str(described),
            stdin=asyncio.subprocess.PIPE if program.stdin else asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(status, described),
            start_new_session=True,
            env={},
            cwd="/",
        )


def _encoded(program: Program, containment: Containment, limits: Mapping[str, int]) -> bytes:
    whom = containment.account
    return marshal.dumps(
        {
            "parent": os.getpid(),
            "program": program.path,
            "argv": [program.path, *program.arguments],
            "environment": dict(program.environment),
            "folder": program.folder,
            "limits": dict(limits),
            "uid": whom.uid,
            "gid": whom.gid,
            "groups": [whom.gid],
            "umask": containment.umask,
            "no_new_privileges": containment.no_new_privileges,
            "may_detach": containment.may_detach,
            "term_seconds": containment.term_seconds,
        }
    )


def outcome(status: bytes) -> int | None:
    """How the program ended, as `waitpid` tells it; None if nobody knows. OSError if it could not begin."""
    lines = [line.split(" ", 2) for line in status.decode(errors="replace").splitlines()]
    for word, number, *rest in lines:
        if word == "failed":
            raise OSError(int(number), " ".join(rest))
    return next((int(number) for word, number, *_ in lines if word == "ended"), None)


def in_memory(content: bytes) -> int:
    """A file that nobody else can open, at its beginning."""
    descriptor = os.memfd_create("command", os.MFD_CLOEXEC)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
