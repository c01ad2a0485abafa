"""Running one job to its end: as whom, under which limits, and what is kept of its output.

Of each output the beginning and the end are kept, however much there is; the rest is read, so that the
program is not held up, and counted. Cancelled, a run returns only when nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final

from fleetplane.domains.boards.agent.commands.rules import ProgramJob
from fleetplane.kernel.errors import FailedPrecondition, PermissionDenied, Unavailable
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, ProgramUser, ResourceLimits, account
from fleetplane.node.programs.guard import Program
from fleetplane.node.programs.output import KeptOutput

FILE_LIMIT_BYTES: Final = 1024 * 1024
OPEN_FILES: Final = 256
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LANGUAGE: Final = "C.UTF-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
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


async def run(job: ProgramJob, *, processes: int, memory_bytes: int) -> ProgramEnd:
    """Unavailable, PermissionDenied or FailedPrecondition if it could not begin."""
    whom = account(job.run_as)
    require_safe(job.program)
    kept = KeptOutput(job.output_bytes)
    program = Program(
        path=job.program,
        arguments=job.arguments,
        environment=environment_of(job, whom),
        folder=job.working_dir,
        stdin=job.stdin,
    )
    limits = ResourceLimits(
        processes=processes,
        address_space_bytes=memory_bytes,
        cpu_seconds=job.timeout_seconds + 1,
        file_bytes=FILE_LIMIT_BYTES,
        open_files=OPEN_FILES,
    )
    try:
        ended = await programs.run(
            program, Containment(account=whom, limits=limits), kept, timeout_seconds=job.timeout_seconds
        )
    except OSError as error:
        raise Unavailable(
            f"{job.program} could not be started: {error.strerror}", details={"cause": "start"}
        ) from error
    if not ended.is_known and not ended.timed_out:
        raise Unavailable("the command was lost", details={"cause": "guard"})
    return ProgramEnd(
        exit_code=ended.exit_code,
        signal=ended.signal,
        timed_out=ended.timed_out,
        stdout=bytes(kept.stdout),
        stderr=bytes(kept.stderr),
        stdout_truncated=kept.stdout.truncated,
        stderr_truncated=kept.stderr.truncated,
        output_bytes=kept.stdout.total + kept.stderr.total,
    )


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


def environment_of(job: ProgramJob, whom: ProgramUser) -> Mapping[str, str]:
    return {**job.environment, "PATH": PATH, "LANG": LANGUAGE, "HOME": whom.home}
