"""Keeping one program running: started again after each end, at growing intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fleetplane.domains.boards.agent.audit import BoardAuditLog, Value
from fleetplane.domains.boards.agent.commands.runs import OPEN_FILES, environment_of, require_safe
from fleetplane.domains.boards.agent.desired.document import KeptJob
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, ResourceLimits, account
from fleetplane.node.programs.guard import Program
from fleetplane.node.programs.output import FLOOD_SECONDS, OutputTail, ProgramStream
from fleetplane.node.programs.run import ProgramExit

CALM_SECONDS: Final = 60.0
"""After so long without an end, the waits begin anew."""
RESTART: Final = Backoff(first_seconds=1.0, ceiling_seconds=300.0)
TAIL_BYTES: Final = 4096
FREE_BYTES: Final = 64 * 1024
"""Written without a pause after each chunk."""
WORDS_LIMIT: Final = 160
"""Characters of a program's last line that are reported."""


class LastWords:
    """Keeps the end of what a program writes, so that its last line can be told."""

    def __init__(self) -> None:
        self._ends = {channel: OutputTail(TAIL_BYTES) for channel in ProgramStream}
        self._total = 0

    def __repr__(self) -> str:
        return f"<LastWords {self.line!r}>"

    async def take(self, channel: ProgramStream, data: bytes) -> None:
        self._ends[channel].add(data)
        self._total += len(data)
        if self._total > FREE_BYTES:  # nobody needs it fast, and others need the processor
            await asyncio.sleep(FLOOD_SECONDS)

    @property
    def line(self) -> str:
        """The last line that was written as an error, else the last one at all."""
        for channel in (ProgramStream.STDERR, ProgramStream.STDOUT):
            lines = bytes(self._ends[channel]).decode("utf-8", "replace").strip().splitlines()
            if lines:
                return "".join(one for one in lines[-1] if one.isprintable())[:WORDS_LIMIT]
        return ""


@dataclass(slots=True, kw_only=True)
class SupervisedProgram:
    name: str
    kept: KeptJob
    processes: int
    memory_bytes: int
    clock: Clock
    audit: BoardAuditLog
    clean: Callable[[str], str]
    """Takes secrets out of what is told."""
    changed: Callable[[], None]
    """Called when it is up, and when it ended."""
    up: bool = False
    exit_code: int = 0
    restarts: int = 0
    failures: int = 0
    problem: str = ""
    """Why it is not up; empty once it is."""
    _failed_in_row: int = field(default=0)

    async def run(self) -> None:
        """Until cancelled; then nothing of it is left."""
        while True:
            started = self.clock.monotonic()
            try:
                await self._once()
            except (FleetplaneError, OSError) as error:
                words = error.message if isinstance(error, FleetplaneError) else str(error.strerror)
                self._ended(f"cannot be run: {words}")
            if self.clock.monotonic() - started >= CALM_SECONDS:
                self._failed_in_row = 0
            pause = RESTART.delay_seconds(self._failed_in_row, jitter=self.clock.random())
            self._failed_in_row += 1
            await self.clock.sleep(pause)
            self.restarts += 1

    async def _once(self) -> None:
        whom, job = account(self.kept.job.run_as), self.kept.job
        await asyncio.to_thread(require_safe, job.program)
        facts: dict[str, Value] = {"name": self.name, "program": job.program, "run_as": job.run_as}
        self.audit.require("program_begun", facts)
        output = LastWords()
        program = Program(
            path=job.program,
            arguments=job.arguments,
            environment=environment_of(job, whom),
            folder=job.working_dir,
        )
        limits = ResourceLimits(
            processes=self.processes, address_space_bytes=self.memory_bytes, open_files=OPEN_FILES
        )
        containment = Containment(account=whom, limits=limits)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(_run(program, containment, output))
                _, going = await asyncio.wait({running}, timeout=self.kept.up_seconds)
                if going:
                    self.up, self.problem = True, ""
                    self.changed()
                ended = await running
        finally:
            self.up = False
        if isinstance(ended, OSError):
            raise ended
        self.audit.note("program_ended", {**facts, "exit_code": ended.exit_code, "signal": ended.signal})
        self.exit_code = ended.exit_code
        self._ended(_told(ended, self.clean(output.line)))

    def _ended(self, problem: str) -> None:
        self.problem = f"program {self.name} {problem}"
        self.failures += 1
        self.changed()


async def _run(program: Program, containment: Containment, output: LastWords) -> ProgramExit | OSError:
    """How it ended, or why it could not be started: no error that would end its supervisor."""
    try:
        return await programs.run(program, containment, output)
    except OSError as error:
        return error


def _told(ended: ProgramExit, words: str) -> str:
    how = f"was ended by signal {ended.signal}" if ended.signal else f"ended with {ended.exit_code}"
    return f"{how}: {words}" if words else how
