"""REST: programs on many boards, in waves."""

from __future__ import annotations

import msgspec

from fleetplane.domains.boards.access import OPERATE, READ
from fleetplane.domains.boards.calls.on_behalf_of import asked_by
from fleetplane.domains.boards.commands.courier import BoardCommander
from fleetplane.domains.boards.commands.encoding import TIMEOUT_SECONDS, BoardProgram
from fleetplane.domains.boards.commands.runs import BoardRuns, BoardRunSpec, ProgramCall, ProgramOrder
from fleetplane.domains.boards.rest.common import BoardCall, actor
from fleetplane.fleet.runs.channel import RunOrder
from fleetplane.fleet.runs.rest import RunBody, RunRequests, RunRoutes, TargetResult
from fleetplane.kernel.commands import CommandTarget


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
