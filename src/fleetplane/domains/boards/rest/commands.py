"""REST: programs on boards, diagnostic commands and runs in waves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace

from fleetplane.domains.boards.access import OPERATE, READ
from fleetplane.domains.boards.calls.channels import asked_by
from fleetplane.domains.boards.commands.courier import CHANNEL, BoardCommander, BoardOutcome
from fleetplane.domains.boards.commands.encoding import TIMEOUT_SECONDS, BoardProgram, decoded_order
from fleetplane.domains.boards.commands.runs import (
    BoardRuns,
    BoardRunSpec,
    ProgramCall,
    ProgramOrder,
    Selection,
    facts,
)
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.kinds import SCOPE, number_of
from fleetplane.domains.boards.rest.common import ACCEPTED, PAGING, BoardCall, actor, listed, number_in
from fleetplane.domains.boards.rest.shapes.people import (
    CommandData,
    CommandDetail,
    CommandDetailData,
    CommandRows,
    IssuedCommand,
    ShownCommand,
    ShownOutcome,
)
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.policy import Mode, OnFailure, RunPolicy
from fleetplane.fleet.runs.records import Run
from fleetplane.fleet.runs.rest import RunBody, RunRequests, RunRoutes, TargetResult
from fleetplane.fleet.runs.targets import RunTarget
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, OPEN, Command, CommandState, CommandTarget
from fleetplane.kernel.commands.rules import targets_scope
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import spelled, spelled_or_null
from fleetplane.web.rest.routes import Answer, Route, RouteGroup, Stream
from fleetplane.web.streaming import EVENT_STREAM, event


class BoardRunBody(RunBody, forbid_unknown_fields=True, kw_only=True):
    command: str
    args: list[str] = msgspec.field(default_factory=list)
    working_dir: str = ""
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    stdin: str = ""
    max_output_bytes: int = 0
    profile: str = ""


def order(call: BoardCall) -> ProgramOrder:
    """What a request asks for. Within how long each board must be done is the policy's."""
    body: BoardRunBody = call.body
    asked = asked_by(call.caller.principal)
    program = BoardProgram(
        command=body.command,
        args=tuple(body.args),
        working_dir=body.working_dir,
        environment=body.environment,
        stdin=body.stdin.encode(),
        max_output_bytes=body.max_output_bytes,
        profile=body.profile,
    )
    return RunOrder(
        scope=call.scope,
        target=body.target.target(),
        call=ProgramCall(order=program, role=asked.role),
        policy=body.policy.policy(deadline_seconds=TIMEOUT_SECONDS),
        actor=actor(call),
    )


def run_routes(runs: BoardRuns, commander: BoardCommander) -> RunRoutes[BoardRunSpec, ProgramCall]:
    def result(target: CommandTarget) -> TargetResult:
        outcome = commander.outcome(target)
        answer = outcome.answer
        if answer is None:
            return TargetResult(message=outcome.detail)
        return TargetResult(
            message=outcome.detail,
            exit_code=answer.exit_code,
            duration_seconds=round(answer.duration_seconds, 6),
            stdout=answer.stdout.decode("utf-8", "replace"),
            stderr=answer.stderr.decode("utf-8", "replace"),
        )

    requests: RunRequests[BoardRunSpec, ProgramCall] = RunRequests(
        base="",
        tag="Runs",
        read=READ,
        operate=OPERATE,
        body=BoardRunBody,
        order=order,
        target=lambda spec: spec.target,
        program=lambda spec: (spec.order.command, spec.order.args),
        result=result,
        actor=actor,
        anywhere=True,
    )
    return RunRoutes(runs, requests)


TARGETS_LIMIT = 10_000
WAIT_LIMIT_SECONDS = 7 * 86_400.0
_ONE = "/commands/{command}"
_ROUTES = RouteGroup("Commands")


class CommandBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    command: str
    args: list[str] = []
    timeout_seconds: float = TIMEOUT_SECONDS
    working_dir: str = ""
    environment: dict[str, str] = {}
    stdin: str = ""
    max_output_bytes: int = 0
    profile: str = ""
    deliver_within_seconds: float = 0.0
    """How long boards that are away have to come back; 0 for not at all."""

    def order(self) -> BoardProgram:
        return BoardProgram(
            command=self.command,
            args=tuple(self.args),
            timeout_seconds=self.timeout_seconds,
            working_dir=self.working_dir,
            environment=self.environment,
            stdin=self.stdin.encode(),
            max_output_bytes=self.max_output_bytes,
            profile=self.profile,
        )


class FleetBody(CommandBody, forbid_unknown_fields=True, kw_only=True):
    target: Selection


class CommandRoutes:
    def __init__(self, store: Store, *, boards: Boards, commander: BoardCommander, runs: BoardRuns) -> None:
        self._store = store
        self._boards = boards
        self._commander = commander
        self._runs = runs

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.post("/nodes/{id}/exec", self.execute, OPERATE, body=CommandBody),
            _ROUTES.post("/exec", self.execute_on_many, OPERATE, body=FleetBody, status=ACCEPTED),
            _ROUTES.get("/commands", self.list, READ, query=PAGING),
            _ROUTES.get(_ONE, self.show, READ),
            _ROUTES.get(f"{_ONE}/events", self.follow, READ, streams=True),
            _ROUTES.post(f"{_ONE}/cancel", self.cancel, OPERATE),
        )

    # Running.

    async def execute(self, call: BoardCall) -> Answer[ShownOutcome]:
        """Run an allowed program on a board, and wait for it."""
        body: CommandBody = call.body
        command = await self._commander.execute(
            body.order(),
            [number_in(call)],
            asked=asked_by(call.caller.principal),
            wait_seconds=_wait_seconds(body),
        )
        (outcome,) = await self._commander.finished(command)
        return Answer(content=_outcome(outcome, command_id=command.name))

    async def execute_on_many(self, call: BoardCall) -> Answer[IssuedCommand]:
        """Run an allowed program on boards; follow it at /commands."""
        body: FleetBody = call.body
        targets = self._meant(body.target)

        def answer(run: Run[BoardRunSpec]) -> Answer[IssuedCommand]:
            return Answer(content=IssuedCommand(command_id=run.name, node_ids=targets, count=len(targets)))

        call.answering(lambda issued: answer(issued.beside))
        return answer(await self._runs.start(self._one_wave(call, body, targets)))

    def _one_wave(self, call: BoardCall, body: CommandBody, boards: Sequence[int]) -> ProgramOrder:
        """All boards at once, whatever fails; those that are away have the outcome that says so."""
        wait_seconds = _wait_seconds(body)
        asked, program = asked_by(call.caller.principal), body.order().checked()
        policy = RunPolicy(
            mode=Mode.PARALLEL,
            on_failure=OnFailure.CONTINUE,
            deadline_seconds=program.timeout_seconds,
            wait=wait_seconds > 0,
            deliver_within_seconds=wait_seconds or RunPolicy().deliver_within_seconds,
        )
        return RunOrder(
            scope=SCOPE,
            target=RunTarget(names=tuple(map(str, boards))),
            policy=policy,
            actor=actor(call),
            call=ProgramCall(order=program, role=asked.role),
            keeps_absent=True,
        )

    def _meant(self, wanted: Selection) -> list[int]:
        for number in wanted.node_ids:
            self._boards.require(number, field="target.node_ids")
        selector = wanted.selector()
        found = [number_of(board) for board in self._boards.all() if selector.matches(facts(board, {}))]
        if not 1 <= len(found) <= TARGETS_LIMIT:
            raise InvalidArgument(f"means {len(found)} boards, not 1 to {TARGETS_LIMIT}", field="target")
        return found

    # Looking.

    async def list(self, call: BoardCall) -> Answer[CommandRows]:
        """List commands, newest first."""
        found = [one for one in self._store.list(COMMAND, SCOPE) if one.spec.channel == CHANNEL]
        found.sort(key=lambda one: -one.created_revision)
        return Answer(content=listed(call, found, _command, CommandRows))

    async def show(self, call: BoardCall) -> Answer[CommandDetailData]:
        """Get a command, with the outcome on each board."""
        command = self._command(call)
        outcomes = [_outcome(one) for one in self._commander.outcomes(command)]
        detail = CommandDetail(**asdict(_command(command)), outcomes=outcomes)
        return Answer(content=CommandDetailData(data=detail))

    async def follow(self, call: BoardCall) -> Stream:
        """Follow a command as server-sent events."""
        return Stream(chunks=self._events(self._command(call)), content_type=EVENT_STREAM)

    async def _events(self, command: Command) -> AsyncGenerator[bytes]:
        """Each board's outcome once, as soon as it has one; then the end."""
        told: set[int] = set()
        below = targets_scope(command.scope, command.name)
        with self._store.watch(COMMAND_TARGET, below) as watch:
            while True:
                outcomes = self._commander.outcomes(command)
                for outcome in outcomes:
                    if outcome.state not in OPEN and outcome.board not in told:
                        told.add(outcome.board)
                        yield event("outcome", _outcome(outcome))
                if len(told) == len(outcomes):
                    break
                await watch.next()
        yield event("end", _command(self._store.get(COMMAND, SCOPE, command.name) or command))

    async def cancel(self, call: BoardCall) -> Answer[CommandData]:
        """Cancel a command; running programs are terminated."""
        command = self._command(call)
        if self._runs.find(SCOPE, command.name) is not None:
            await self._runs.cancel(SCOPE, command.name, actor=call.caller.name)
        else:
            await self._commander.cancel(command.name, actor=call.caller.name)
        return Answer(content=CommandData(data=_command(self._command(call))))

    def _command(self, call: BoardCall) -> Command:
        name = call.path["command"]
        found = self._store.get(COMMAND, SCOPE, name)
        if found is None or found.spec.channel != CHANNEL:
            raise NotFound(f"there is no command {name[:64]!r}", field="command")
        return found


_KNOWN = {CommandState.HELD: CommandState.WAITING}
"""Clients of these routes know no state of boards whose turn has not come."""


def _wait_seconds(body: CommandBody) -> float:
    if not 0 <= body.deliver_within_seconds <= WAIT_LIMIT_SECONDS:
        raise InvalidArgument(f"must be 0 to {WAIT_LIMIT_SECONDS:g}", field="deliver_within_seconds")
    return body.deliver_within_seconds


def _command(command: Command) -> ShownCommand:
    order, _role = decoded_order(command.spec.payload)
    status = command.status
    return ShownCommand(
        id=command.name,
        command=order.command,
        args=list(order.args),
        requested_by=command.spec.actor,
        created_at=spelled(command.created_at_ns),
        finished_at=spelled_or_null(status.finished_at_ns if status is not None else None),
        targets=command.spec.targets,
        open=status.open if status is not None else command.spec.targets,
        outcomes_by_state={state.value: count for state, count in status.outcomes.items()}
        if status is not None
        else {},
    )


def _outcome(outcome: BoardOutcome, *, command_id: str | UnsetType = UNSET) -> ShownOutcome:
    """Output as text; what is none is shown as well as it can be."""
    answer = outcome.answer
    told = ShownOutcome(
        command_id=command_id,
        node_id=outcome.board,
        state=_KNOWN.get(outcome.state, outcome.state).value,
        success=answer is not None and answer.success,
        message=outcome.detail,
    )
    if answer is None:
        return told
    return replace(
        told,
        exit_code=answer.exit_code,
        stdout=answer.stdout.decode("utf-8", "replace"),
        stderr=answer.stderr.decode("utf-8", "replace"),
        stdout_truncated=answer.stdout_truncated,
        stderr_truncated=answer.stderr_truncated,
        started_at=spelled_or_null(answer.started_at_ns),
        duration_seconds=round(answer.duration_seconds, 6),
        timed_out=answer.timed_out,
        signal=answer.signal,
        reason=answer.reason,
    )
