"""Commands for diagnosis: who may have what run, how many at once, and what is written down of it.

A run is audited before it begins and after it ended, refusals too. Without an audit log nothing is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.agent.audit import BoardAuditLog, Value
from fleetplane.domains.boards.agent.commands import rules as command_rules
from fleetplane.domains.boards.agent.commands import runs as command_runs
from fleetplane.domains.boards.agent.commands.rules import CommandPolicy, Free, ProgramJob, ProgramRequest
from fleetplane.domains.boards.agent.commands.runs import ProgramEnd
from fleetplane.domains.boards.agent.logs.patterns import Redaction
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted

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
            ended = await command_runs.run(
                job, processes=self._policy.processes, memory_bytes=self._policy.memory_bytes
            )
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
