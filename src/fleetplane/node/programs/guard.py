"""Starting a program through its guard, which lets nothing of it outlive its time.

The guard (`command_guard.py`) is a process of its own for each program: it becomes the parent of all that
the program leaves behind, also of what made a session of its own, and ends that with it. Told to end by
TERM it ends everything politely, then not; a second TERM means now.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetplane.node.programs.containment import Containment

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
