"""Diagnostic commands: who may run what, how many run at once, running one, and its audit entries.

A run is audited before it begins and after it ended, refusals too. Without an audit log nothing is run. The
beginning and the end of each output are kept; the rest is read, so that the program does not block, and
counted. A cancelled run returns only when no process of it is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final

from fleetplane.domains.boards.agent.audit import BoardAuditLog, Value
from fleetplane.domains.boards.agent.commands import rules as command_rules
from fleetplane.domains.boards.agent.commands.rules import CommandPolicy, Free, ProgramJob, ProgramRequest
from fleetplane.domains.boards.agent.logs.entries import Redaction
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    FailedPrecondition,
    FleetplaneError,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, Program, ProgramUser, ResourceLimits, account
from fleetplane.node.programs.run import KeptOutput

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


CONCURRENT: Final = 2
AUDITED_ARGUMENT_LIMIT: Final = 256
"""Characters of one argument that the audit log keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCaller:
    user: str
    """As the certificate says it."""
    peer: str
    on_behalf_of: str = ""
    """Whom a server says that it acts for."""
    is_admin: bool = False
    is_admin_by_hearsay: bool = False
    """A server says that it acts for an admin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    ended: ProgramEnd
    started_at_ns: int
    duration_seconds: float


class BoardCommands:
    def __init__(
        self, policy: CommandPolicy, clock: Clock, *, audit: BoardAuditLog, redaction: Redaction | None = None
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._audit = audit
        self._redaction = redaction or Redaction()
        self._running = 0

    def __repr__(self) -> str:
        return f"<Commands profiles={len(self._policy.profiles)} running={self._running}>"

    @property
    def allowed(self) -> bool:
        """Whether anything at all may be run."""
        return bool(self._policy.profiles) or self._policy.free is not Free.NEVER

    async def execute(
        self, asked: ProgramRequest, caller: CommandCaller, *, request_id: str = ""
    ) -> ProgramOutcome:
        facts: dict[str, Value] = {
            "user": caller.user,
            "on_behalf_of": caller.on_behalf_of,
            "peer": caller.peer,
            "request_id": request_id,
            "command": self._cleaned(asked.command),
            "args": [self._cleaned(argument) for argument in asked.arguments],
        }
        try:
            job = command_rules.decide(self._policy, asked, free=self._is_free_for(caller))
            if self._running >= CONCURRENT:
                raise ResourceExhausted(
                    f"{CONCURRENT} commands run here already",
                    retry_after_seconds=1.0,
                    details={"cause": "concurrency"},
                )
        except FleetplaneError as error:
            self._audit.note("command_refused", {**facts, "message": error.message})
            raise
        begun: dict[str, Value] = {"profile": job.profile or "free", "run_as": job.run_as}
        self._audit.require("command_begun", {**facts, **begun})
        self._running += 1
        try:
            return await self._run(job, facts)
        finally:
            self._running -= 1

    async def _run(self, job: ProgramJob, facts: dict[str, Value]) -> ProgramOutcome:
        started_at_ns, started = self._clock.now_ns(), self._clock.monotonic()
        try:
            ended = await run(job, processes=self._policy.processes, memory_bytes=self._policy.memory_bytes)
        except BaseException as error:
            words = error.message if isinstance(error, FleetplaneError) else "cut short by its caller"
            seconds = round(self._clock.monotonic() - started, 3)
            self._audit.note("command_failed", {**facts, "message": words, "seconds": seconds})
            raise
        duration = self._clock.monotonic() - started
        result: dict[str, Value] = {
            "exit_code": ended.exit_code,
            "signal": ended.signal,
            "timed_out": ended.timed_out,
            "seconds": round(duration, 3),
            "output_bytes": ended.output_bytes,
        }
        self._audit.note("command_ended", {**facts, **result})
        return ProgramOutcome(ended=ended, started_at_ns=started_at_ns, duration_seconds=duration)

    def _is_free_for(self, caller: CommandCaller) -> bool:
        match self._policy.free:
            case Free.NEVER:
                return False
            case Free.ADMINS:
                return caller.is_admin
            case Free.CONTROLLERS:
                return caller.is_admin or caller.is_admin_by_hearsay

    def _cleaned(self, text: str) -> str:
        return self._redaction.clean(text)[:AUDITED_ARGUMENT_LIMIT]
