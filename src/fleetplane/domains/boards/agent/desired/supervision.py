"""The desired document of a board, the programs in it as jobs, and the supervisor of one program.

The server says what should run; this board decides whether it may. `jobs` refuses the whole document if one
program is not named by `[programs]` of the board's configuration or has arguments in another form. A
supervised program is started again after each end, at growing intervals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fleetplane.domains.boards.agent.audit import BoardAuditLog, Value
from fleetplane.domains.boards.agent.commands import rules as command_rules
from fleetplane.domains.boards.agent.commands.commands import OPEN_FILES, environment_of, require_safe
from fleetplane.domains.boards.agent.commands.rules import CommandPolicy, ProgramJob, ProgramRequest
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, InvalidArgument
from fleetplane.node.programs import run as programs
from fleetplane.node.programs.containment import Containment, Program, ResourceLimits, account
from fleetplane.node.programs.run import FLOOD_SECONDS, OutputTail, ProgramExit, ProgramStream

PROGRAMS_LIMIT: Final = 32
UP_LIMIT_SECONDS: Final = 300.0


class KeptProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program that is kept running."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    working_dir: str = ""
    up_seconds: float = 2.0
    """It is up once it has run so long; one that ends before has failed to start."""


class DesiredDocument(msgspec.Struct, frozen=True, kw_only=True):
    """As it stands on disk: no field may be renamed."""

    set: str = ""
    version: str = ""
    programs: tuple[KeptProgram, ...] = ()
    pins: Mapping[int, int] = {}
    """Levels of outputs by pin."""
    packages: Mapping[str, str] = {}
    """Versions by name; an empty one for any."""


def of_message(message: pb.DesiredState) -> DesiredDocument:
    """What the server sent."""
    return DesiredDocument(
        set=message.set,
        version=message.version,
        programs=tuple(
            KeptProgram(
                name=one.name,
                command=one.command,
                args=tuple(one.args),
                environment=dict(one.environment),
                working_dir=one.working_dir,
                up_seconds=max(0.0, min(one.up_seconds, UP_LIMIT_SECONDS)),
            )
            for one in message.programs
        ),
        pins={one.pin: int(one.state == pb.GPIORequest.HIGH) for one in message.pins},
        packages={one.name: one.version for one in message.packages},
    )


def encoded(desired: DesiredDocument) -> bytes:
    return msgspec.json.encode(desired) + b"\n"


def decoded(raw: bytes) -> DesiredDocument:
    """What was kept on disk, or IntegrityError."""
    try:
        return msgspec.json.decode(raw, type=DesiredDocument)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"what this board is to run cannot be read: {error}") from error


class KeptJob(msgspec.Struct, frozen=True, kw_only=True):
    """A program as it may be run here."""

    job: ProgramJob
    up_seconds: float


def jobs(desired: DesiredDocument, policy: CommandPolicy) -> Mapping[str, KeptJob]:
    """What to run for each program, by its name; the first one that may not be run raises."""
    names = [one.name for one in desired.programs]
    if len(names) > PROGRAMS_LIMIT or len(names) != len(set(names)):
        raise InvalidArgument(f"there are at most {PROGRAMS_LIMIT} programs, each once", field="programs")
    found = {}
    for one in desired.programs:
        asked = ProgramRequest(
            command=one.command,
            arguments=one.args,
            environment=one.environment,
            working_dir=one.working_dir,
        )
        try:
            job = command_rules.decide(policy, asked, free=False)
            require_safe(job.program)
        except FleetplaneError as error:
            raise type(error)(f"program {one.name}: {error.message}") from error
        found[one.name] = KeptJob(job=job, up_seconds=one.up_seconds)
    return found


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
