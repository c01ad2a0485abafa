"""The commands that run here: taken once each, side by side, each until its own end.

Owns their lives and nothing else. Whether a call may run is judged in `jobs`, what it does in the
tools, and what the server hears of it goes out through whatever session there is at the moment:
output that nobody can be told is dropped, a result is kept until it was told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import structlog

from fleetplane.domains.edge.agent import events
from fleetplane.domains.edge.agent.commands.journal import CommandJournal, JournalRecord
from fleetplane.domains.edge.agent.commands.judge import Judge, PermittedJob, RefusedCommand
from fleetplane.domains.edge.agent.commands.policy import CapabilityLimiter
from fleetplane.domains.edge.agent.tools.command import TERM_SECONDS
from fleetplane.domains.edge.agent.tools.contract import (
    CommandOutcomeReport,
    ErrorKind,
    PermittedCall,
    ProgramLimits,
    ProgramPrivileges,
    ProgramStream,
    ToolFailed,
    ToolState,
)
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.unbroken import run_to_completion
from fleetplane.node.tasks import in_thread

HELD_LIMIT: Final = 256
"""Commands that run or wait for their turn; a server sends few more at once than may run."""
ID_LIMIT: Final = 128
STOP_SECONDS: Final = TERM_SECONDS + 5.0
"""Seconds for commands to stop: terminated, killed, and their results written."""


class Outlet(Protocol):
    """Where news of commands goes."""

    async def progress(self, command_id: str, chunk: bytes) -> None: ...

    def result(self, command_id: str, result: bytes) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    task: asyncio.Task[None] | None = None
    reason: str | None = None
    """Why it is being cancelled."""
    answered: bool = False
    asked_again: bool = False
    """Cancelled when it was over."""
    sequence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSurroundings:
    """What commands find on this machine."""

    environment: Mapping[str, str]
    output_limit_bytes: int
    concurrent: int
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    privileges: ProgramPrivileges = field(default_factory=ProgramPrivileges)


@dataclass(slots=True, kw_only=True)
class CommandWork:
    judge: Callable[[], Judge]
    """By what is in force now."""
    surroundings: Callable[[], CommandSurroundings]
    journal: CommandJournal
    outlet: Outlet
    clock: Clock
    log: structlog.typing.FilteringBoundLogger
    draining: bool = False
    _held: dict[str, _Held] = field(default_factory=dict)
    _turns: asyncio.Event = field(default_factory=asyncio.Event)
    _active: int = 0
    _disk: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The journal has one user at a time."""
    _limiter: CapabilityLimiter = field(default_factory=CapabilityLimiter)
    _tasks: asyncio.TaskGroup | None = None
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __repr__(self) -> str:
        return f"<Work running={self._active} held={len(self._held)} draining={self.draining}>"

    @property
    def active(self) -> int:
        return len(self._held)

    async def run(self) -> None:
        """Until cancelled; whatever runs then is stopped first."""
        self._idle.set()
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None
                for held in self._held.values():
                    if held.task is not None:
                        held.task.cancel()

    # What the server asks for.

    def take(self, call: pb.InvokeTool) -> None:
        """Begin a command, unless it was begun before."""
        command_id = call.command_id
        if not command_id or len(command_id) > ID_LIMIT:
            self.log.warning("command_without_id", tool=call.tool_name[:80])
        elif command_id in self._held:
            self.log.info("command_repeated", command=command_id)
        elif (record := self.journal.find(command_id)) is not None:
            self.log.info("command_repeated", command=command_id)
            self.outlet.result(command_id, _answer_of(record))
        elif self.draining:
            self._answer(command_id, events.refusal(ErrorKind.DRAINING, "this machine takes no new work"))
        elif len(self._held) >= HELD_LIMIT or self._tasks is None:
            self._answer(command_id, events.refusal(ErrorKind.BUSY, "too many commands are held already"))
        else:
            held = self._held[command_id] = _Held()
            self._idle.clear()
            # Judged by what is in force now, though its paths may take a while to be followed.
            held.task = self._tasks.create_task(self._serve(call, self.judge(), held))
            held.task.add_done_callback(lambda _: self._left(command_id, held))

    def cancel(self, command_id: str, reason: str) -> None:
        held = self._held.get(command_id)
        if held is not None and held.answered:
            held.asked_again = True  # its end is being noted and told; once more when that is done
        elif held is not None:
            if held.reason is None:
                held.reason = reason or "cancelled by the server"
                if held.task is not None:
                    held.task.cancel()
        elif (record := self.journal.find(command_id)) is not None:
            self.outlet.result(command_id, _answer_of(record))
        else:
            words = "there is no such command on this machine"
            self._answer(
                command_id[:ID_LIMIT], CommandOutcomeReport(state=ToolState.CANCELLED, message=words)
            )

    def look_again(self) -> None:
        """What commands find here has changed: more of those that wait may run now."""
        self._turns.set()

    async def drained(self) -> None:
        """Until nothing is held any more."""
        await self._idle.wait()

    async def stop(self, *, grace_seconds: float, reason: str) -> None:
        """Take no more, let what runs finish, and stop what takes longer than the grace."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._idle.wait()
        except TimeoutError:
            for command_id in list(self._held):
                self.cancel(command_id, reason)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._idle.wait()
            except TimeoutError:
                self.log.error("commands_do_not_stop", commands=sorted(self._held))

    # One command.

    async def _serve(self, call: pb.InvokeTool, judge: Judge, held: _Held) -> None:
        command_id = call.command_id
        try:
            job = await asyncio.to_thread(judge.judge, call)
            if why := self._limiter.admit_all(job.context, job.permits, now=self.clock.monotonic()):
                raise RefusedCommand(ErrorKind.POLICY_VIOLATION, why)
            try:
                await self._do(job, held)
            finally:
                for permit in job.permits:
                    self._limiter.leave(job.context, permit)
        except RefusedCommand as error:
            self.log.warning(
                "command_refused",
                command=command_id,
                tool=call.tool_name[:80],
                kind=error.kind,
                why=error.message,
            )
            held.answered = True
            self._answer(command_id, events.refusal(error.kind, error.message))

    def _left(self, command_id: str, held: _Held) -> None:
        """However a command's task ended, even before its first step."""
        del self._held[command_id]
        if not self._held:
            self._idle.set()
        if held.reason is not None and not held.answered:
            self._answer(command_id, CommandOutcomeReport(state=ToolState.CANCELLED, message=held.reason))
        elif held.asked_again and (record := self.journal.find(command_id)) is not None:
            self.outlet.result(command_id, _answer_of(record))

    async def _do(self, job: PermittedJob, held: _Held) -> None:
        began = self.clock.monotonic()
        await self._turn()
        try:
            outcome = await self._run(job, held)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if held.reason is None or task is None:
                raise  # the daemon goes; the journal knows what was begun
            task.uncancel()
            outcome = CommandOutcomeReport(state=ToolState.CANCELLED, message=held.reason)
        finally:
            self._active -= 1
            self._turns.set()
        outcome = replace(outcome, seconds=self.clock.monotonic() - began)
        held.answered = True
        await run_to_completion(self._end(job, outcome))

    async def _turn(self) -> None:
        """Wait until one more may run."""
        while self._active >= self.surroundings().concurrent:
            self._turns.clear()
            await self._turns.wait()
        self._active += 1

    async def _run(self, job: PermittedJob, held: _Held) -> CommandOutcomeReport:
        try:
            await self._write(lambda: self.journal.begun(job.command_id, now=self.clock.now_ns() / 1e9))
        except OSError as error:
            return events.refusal(ErrorKind.INTERNAL, f"not begun, since that could not be noted: {error}")
        self.log.info("command_begun", command=job.command_id, tool=job.tool.name, context=job.context)
        try:
            async with asyncio.timeout(job.seconds) as deadline:
                return await job.tool.run(self._call(job, held))
        except ToolFailed as error:
            return CommandOutcomeReport(
                state=ToolState.ERROR, kind=error.kind, message=error.message, exit_code=error.exit_code
            )
        except Exception as error:
            if deadline.expired():
                return CommandOutcomeReport(
                    state=ToolState.TIMED_OUT, message=f"no end within {job.seconds:g} s"
                )
            # A tool may be anyone's code: the command fails, the daemon does not.
            self.log.exception("tool_failed", command=job.command_id, tool=job.tool.name)
            return events.refusal(ErrorKind.INTERNAL, f"{job.tool.name} failed: {error!r}")

    def _call(self, job: PermittedJob, held: _Held) -> PermittedCall:
        here = self.surroundings()
        sizes = (permit.capability.max_response_size for permit in job.permits)
        limit = min([here.output_limit_bytes, *(size for size in sizes if size is not None)])

        async def emit(channel: ProgramStream, data: bytes) -> None:
            held.sequence += 1
            await self.outlet.progress(job.command_id, events.output_chunk(channel, data, held.sequence))

        return PermittedCall(
            arguments=job.arguments,
            paths=job.paths,
            environment=here.environment,
            emit=emit,
            output_limit_bytes=limit,
            limits=here.limits,
            privileges=here.privileges,
        )

    async def _end(self, job: PermittedJob, outcome: CommandOutcomeReport) -> None:
        result = events.encode_result(outcome, deadline_seconds=job.seconds)
        try:
            now = self.clock.now_ns() / 1e9
            await self._write(lambda: self.journal.ended(job.command_id, result, now=now))
        except OSError as error:
            self.log.error("result_not_written", command=job.command_id, error=str(error))
        self.log.info(
            "command_ended",
            command=job.command_id,
            tool=job.tool.name,
            state=outcome.state,
            kind=outcome.kind,
            seconds=round(outcome.seconds, 3),
        )
        self.outlet.result(job.command_id, result)

    async def _write(self, write: Callable[[], None]) -> None:
        async with self._disk:
            await in_thread(write)

    def _answer(self, command_id: str, outcome: CommandOutcomeReport) -> None:
        self.outlet.result(command_id, events.encode_result(outcome))


def _answer_of(record: JournalRecord) -> bytes:
    """The answer to a command that was repeated."""
    if record.result:
        return record.result
    words = "the daemon was stopped while the command ran; whether it took effect is not known"
    if record.result is not None:
        words = "it ended and was answered; the result is no longer kept"
    return events.encode_result(events.refusal(ErrorKind.INTERRUPTED, words))
