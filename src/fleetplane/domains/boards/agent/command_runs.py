"""Running one job to its end, through a guard that outlives it.

Of each output the beginning and the end are kept, however much there is; the rest is read, so that the
program is not held up, and counted. Cancelled, a run returns only when nothing of it is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import resource
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final

from fleetplane.domains.boards.agent.command_rules import Job
from fleetplane.kernel.errors import FailedPrecondition, PermissionDenied, SettingsError, Unavailable

GUARD: Final = Path(__file__).with_name("command_guard.py")
CHUNK_BYTES: Final = 64 * 1024
FLOOD_SECONDS: Final = 0.005
"""Between chunks that are read only to be thrown away: some 12 MB a second."""
STATUS_LIMIT_BYTES: Final = 16 * 1024
GUARD_SECONDS: Final = 8.0
"""A guard that was told to end takes two seconds for the program and five for what it left behind."""
FILE_LIMIT_BYTES: Final = 1024 * 1024
OPEN_FILES: Final = 256
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LANGUAGE: Final = "C.UTF-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    exit_code: int
    """-1 for a program that a signal ended."""
    signal: int
    timed_out: bool
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    output_bytes: int
    """Of both streams, kept or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Whom a program runs as; None where it is us anyway."""

    uid: int | None
    gid: int = 0
    home: str = "/"


def account(run_as: str) -> Account:
    """When we are root, the user that programs run as; otherwise nobody can be had but ourselves."""
    if os.geteuid() != 0:
        own = pwd.getpwuid(os.geteuid())
        return Account(uid=None, home=own.pw_dir or "/")
    try:
        found = pwd.getpwnam(run_as)
    except KeyError:
        raise SettingsError(f"there is no user {run_as!r} to run commands as", field="run_as") from None
    home = found.pw_dir if Path(found.pw_dir).is_dir() else "/"
    return Account(uid=found.pw_uid, gid=found.pw_gid, home=home)


class Ends:
    """The beginning and the end of an output."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_limit = limit_bytes - limit_bytes // 2
        self._tail_limit = limit_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def __repr__(self) -> str:
        return f"<Ends {len(self._head)}+{len(self._tail)} of {self.total}>"

    @property
    def truncated(self) -> bool:
        return self.total > len(self._head) + len(self._tail)

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]

    def __bytes__(self) -> bytes:
        left_out = self.total - len(self._head) - len(self._tail)
        between = b"\n... %d bytes left out ...\n" % left_out if left_out else b""
        return bytes(self._head) + between + bytes(self._tail)


async def run(job: Job, *, processes: int, memory_bytes: int) -> Ended:
    """Unavailable, PermissionDenied or FailedPrecondition if it could not begin."""
    whom = account(job.run_as)
    require_safe(job.program)
    out, err = Ends(job.output_bytes), Ends(job.output_bytes)
    with ExitStack() as kept:
        status_reader, status_writer = os.pipe()
        kept.callback(os.close, status_reader)
        with ExitStack() as passed:
            passed.callback(os.close, status_writer)
            request = _in_memory(_request(job, whom, processes, memory_bytes))
            passed.callback(os.close, request)
            guard = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(GUARD), str(status_writer), str(request),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE, pass_fds=(status_writer, request),
                start_new_session=True, env={}, cwd="/",
            )  # fmt: skip
        timed_out = False
        try:
            async with asyncio.timeout(job.timeout_seconds):
                await _converse(guard, job.stdin, out, err)
        except TimeoutError:
            timed_out = True
        finally:
            await _end(guard, out, err)
        status = os.read(status_reader, STATUS_LIMIT_BYTES)
    return _ended(job, status, out, err, timed_out=timed_out)


def require_safe(program: str) -> None:
    """A program that others can rewrite is not the one that was allowed."""
    try:
        about = Path(program).stat()
    except OSError as error:
        raise FailedPrecondition(
            f"{program} cannot be run: {error.strerror}", details={"cause": "missing"}
        ) from error
    if not S_ISREG(about.st_mode):
        raise FailedPrecondition(f"{program} is no file", details={"cause": "missing"})
    if about.st_mode & 0o022:
        raise PermissionDenied(
            f"{program} could have been replaced by others than its owner", details={"cause": "writable"}
        )


def environment_of(job: Job, whom: Account) -> Mapping[str, str]:
    return {**job.environment, "PATH": PATH, "LANG": LANGUAGE, "HOME": whom.home}


def _request(job: Job, whom: Account, processes: int, memory_bytes: int) -> bytes:
    uid = os.geteuid() if whom.uid is None else whom.uid
    limits = {
        "RLIMIT_NPROC": _bounded(resource.RLIMIT_NPROC, _tasks_of(uid) + processes),
        "RLIMIT_AS": _bounded(resource.RLIMIT_AS, memory_bytes),
        "RLIMIT_CPU": _bounded(resource.RLIMIT_CPU, job.timeout_seconds + 1),
        "RLIMIT_FSIZE": _bounded(resource.RLIMIT_FSIZE, FILE_LIMIT_BYTES),
        "RLIMIT_NOFILE": _bounded(resource.RLIMIT_NOFILE, OPEN_FILES),
        "RLIMIT_CORE": 0,
    }
    request = {
        "parent": os.getpid(),
        "program": job.program,
        "argv": [job.program, *job.arguments],
        "environment": environment_of(job, whom),
        "folder": job.working_dir,
        "limits": limits,
        "uid": whom.uid,
        "gid": whom.gid,
        "groups": [whom.gid],
    }
    return json.dumps(request).encode()


def _bounded(which: int, wanted: int) -> int:
    """No more than we have ourselves: a limit can only be lowered."""
    hard = resource.getrlimit(which)[1]
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def _tasks_of(uid: int) -> int:
    """The kernel counts all of a user's threads together, so those that are there come on top."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _in_memory(content: bytes) -> int:
    """A file that nobody else can open, at its beginning."""
    descriptor = os.memfd_create("command", os.MFD_CLOEXEC)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def _converse(guard: asyncio.subprocess.Process, stdin: bytes, out: Ends, err: Ends) -> None:
    assert guard.stdin is not None
    assert guard.stdout is not None
    assert guard.stderr is not None
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_feed(guard.stdin, stdin))
        tasks.create_task(_drain(guard.stdout, out))
        tasks.create_task(_drain(guard.stderr, err))
    await guard.wait()


async def _feed(writer: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it need not read what it is given
        writer.write(data)
        await writer.drain()
        writer.close()


async def _drain(reader: asyncio.StreamReader, ends: Ends) -> None:
    while data := await reader.read(CHUNK_BYTES):
        ends.add(data)
        if ends.truncated:  # nobody needs it fast any more, and others need the processor
            await asyncio.sleep(FLOOD_SECONDS)


async def _end(guard: asyncio.subprocess.Process, out: Ends, err: Ends) -> None:
    """Nothing of the run is left when this returns, whatever cancels it meanwhile."""
    if guard.returncode is not None:
        return
    with suppress(ProcessLookupError):
        guard.send_signal(signal.SIGTERM)
    finishing = asyncio.ensure_future(_finish(guard, out, err))
    cancelled: asyncio.CancelledError | None = None
    while not finishing.done():
        try:
            await asyncio.shield(finishing)
        except asyncio.CancelledError as error:
            cancelled = error
    finishing.result()
    if cancelled is not None:
        raise cancelled


async def _finish(guard: asyncio.subprocess.Process, out: Ends, err: Ends) -> None:
    assert guard.stdout is not None
    assert guard.stderr is not None
    try:
        async with asyncio.timeout(GUARD_SECONDS):
            await asyncio.gather(_drain(guard.stdout, out), _drain(guard.stderr, err))
            await guard.wait()
    except TimeoutError:
        guard.kill()
        await guard.wait()


def _ended(job: Job, status: bytes, out: Ends, err: Ends, *, timed_out: bool) -> Ended:
    lines = [json.loads(line) for line in status.splitlines() if line]
    failed = next((line for line in lines if "failed" in line), None)
    if failed is not None:
        raise Unavailable(
            f"{job.program} could not be started: {failed['words']}", details={"cause": "start"}
        )
    raw = next((line["ended"] for line in lines if "ended" in line), None)
    if raw is None and not timed_out:
        raise Unavailable("the command was lost", details={"cause": "guard"})
    code = os.waitstatus_to_exitcode(raw) if raw is not None else -int(signal.SIGKILL)
    return Ended(
        exit_code=code if code >= 0 else -1,
        signal=-code if code < 0 else 0,
        timed_out=timed_out,
        stdout=bytes(out),
        stderr=bytes(err),
        stdout_truncated=out.truncated,
        stderr_truncated=err.truncated,
        output_bytes=out.total + err.total,
    )
