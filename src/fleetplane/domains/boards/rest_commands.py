"""REST: programs for diagnosis on boards, and what came of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from fleetplane.domains.boards.access import OPERATE, READ
from fleetplane.domains.boards.asking import asked_by
from fleetplane.domains.boards.command_texts import TIMEOUT_SECONDS, Order, decoded_order
from fleetplane.domains.boards.commander import CHANNEL, Commander, Outcome
from fleetplane.domains.boards.kinds import SCOPE, BoardRole, BoardState, number_of
from fleetplane.domains.boards.registry import Boards, status_of
from fleetplane.domains.boards.rest import ACCEPTED, PAGING, BoardCall, Json, listed, number_in
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, OPEN, Command
from fleetplane.kernel.commands.kinds import targets_scope
from fleetplane.kernel.errors import InvalidArgument, NotFound
from fleetplane.kernel.store import Store
from fleetplane.web.routes import Answer, Route, Stream
from fleetplane.web.streaming import EVENT_STREAM, event
from fleetplane.web.times import spelled, spelled_or_null

TARGETS_LIMIT = 10_000
WAIT_LIMIT_SECONDS = 7 * 86_400.0
_ONE = "/commands/{command}"
_TAG = "Commands"


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

    def order(self) -> Order:
        return Order(
            command=self.command, args=tuple(self.args), timeout_seconds=self.timeout_seconds,
            working_dir=self.working_dir, environment=self.environment, stdin=self.stdin.encode(),
            max_output_bytes=self.max_output_bytes, profile=self.profile,
        )  # fmt: skip


class Selection(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All that is given must fit; nothing given fits nobody, unless `all` is said."""

    node_ids: list[int] = []
    cluster_id: int | None = None
    role: BoardRole | None = None
    status: BoardState | None = None
    labels: dict[str, str] = {}
    all: bool = False


class FleetBody(CommandBody, forbid_unknown_fields=True, kw_only=True):
    target: Selection


class CommandRoutes:
    def __init__(self, store: Store, *, boards: Boards, commander: Commander) -> None:
        self._store = store
        self._boards = boards
        self._commander = commander

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="POST", path="/nodes/{id}/exec", handler=self.execute, tag=_TAG, permission=OPERATE,
                summary="Run an allowed program on a board, and wait for it", body=CommandBody,
                answer=dict[str, Any],
            ),
            Route(
                method="POST", path="/exec", handler=self.execute_on_many, tag=_TAG, permission=OPERATE,
                summary="Run an allowed program on boards; follow it at /commands", body=FleetBody,
                answer=dict[str, Any], status=ACCEPTED,
            ),
            Route(
                method="GET", path="/commands", handler=self.list, tag=_TAG, permission=READ,
                summary="Commands, newest first", answer=dict[str, Any], query=PAGING,
            ),
            Route(
                method="GET", path=_ONE, handler=self.show, tag=_TAG, permission=READ,
                summary="What a command came to, board by board", answer=dict[str, Any],
            ),
            Route(
                method="GET", path=f"{_ONE}/events", handler=self.follow, tag=_TAG, permission=READ,
                summary="The same as it happens, as server-sent events", streams=True,
            ),
            Route(
                method="POST", path=f"{_ONE}/cancel", handler=self.cancel, tag=_TAG, permission=OPERATE,
                summary="Take a command back; what runs is ended", answer=dict[str, Any],
            ),
        )  # fmt: skip

    # Running.

    async def execute(self, call: BoardCall) -> Answer[Json]:
        command = await self._issue(call, call.body, [number_in(call)])
        (outcome,) = await self._commander.finished(command)
        return Answer(content={"command_id": command.name, **_outcome(outcome)})

    async def execute_on_many(self, call: BoardCall) -> Answer[Json]:
        body: FleetBody = call.body
        targets = self._meant(body.target)
        command = await self._issue(call, body, targets)
        return Answer(content={"command_id": command.name, "node_ids": targets, "count": len(targets)})

    async def _issue(self, call: BoardCall, body: CommandBody, boards: Sequence[int]) -> Command:
        if not 0 <= body.deliver_within_seconds <= WAIT_LIMIT_SECONDS:
            raise InvalidArgument(f"must be 0 to {WAIT_LIMIT_SECONDS:g}", field="deliver_within_seconds")
        return await self._commander.execute(
            body.order(), boards, asked=asked_by(call.caller.principal),
            wait_seconds=body.deliver_within_seconds,
        )  # fmt: skip

    def _meant(self, wanted: Selection) -> list[int]:
        for number in wanted.node_ids:
            self._boards.require(number, field="target.node_ids")
        said = (wanted.node_ids, wanted.cluster_id, wanted.role, wanted.status, wanted.labels)
        if not wanted.all and not any(said):
            raise InvalidArgument("say which boards are meant, or `all`", field="target")
        named = set(wanted.node_ids)
        found = [
            number_of(board)
            for board in self._boards.all()
            if (not named or number_of(board) in named)
            and wanted.cluster_id in (None, board.spec.cluster_id)
            and wanted.role in (None, board.spec.role)
            and wanted.status in (None, status_of(board).state)
            and all(board.labels.get(key) == value for key, value in wanted.labels.items())
        ]
        if not 1 <= len(found) <= TARGETS_LIMIT:
            raise InvalidArgument(f"means {len(found)} boards, not 1 to {TARGETS_LIMIT}", field="target")
        return found

    # Looking.

    async def list(self, call: BoardCall) -> Answer[Json]:
        found = [one for one in self._store.list(COMMAND, SCOPE) if one.spec.channel == CHANNEL]
        found.sort(key=lambda one: -one.created_revision)
        return Answer(content=listed(call, found, _command))

    async def show(self, call: BoardCall) -> Answer[Json]:
        command = self._command(call)
        outcomes = [_outcome(one) for one in self._commander.outcomes(command)]
        return Answer(content={"data": {**_command(command), "outcomes": outcomes}})

    async def follow(self, call: BoardCall) -> Stream:
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

    async def cancel(self, call: BoardCall) -> Answer[Json]:
        command = await self._commander.cancel(self._command(call).name, actor=call.caller.name)
        return Answer(content={"data": _command(command)})

    def _command(self, call: BoardCall) -> Command:
        name = call.path["command"]
        found = self._store.get(COMMAND, SCOPE, name)
        if found is None or found.spec.channel != CHANNEL:
            raise NotFound(f"there is no command {name[:64]!r}", field="command")
        return found


def _command(command: Command) -> Json:
    order, _role = decoded_order(command.spec.payload)
    status = command.status
    return {
        "id": command.name,
        "command": order.command,
        "args": list(order.args),
        "requested_by": command.spec.actor,
        "created_at": spelled(command.created_at_ns),
        "finished_at": spelled_or_null(status.finished_at_ns if status is not None else None),
        "targets": command.spec.targets,
        "open": status.open if status is not None else command.spec.targets,
        "outcomes_by_state": {state.value: count for state, count in status.outcomes.items()}
        if status is not None
        else {},
    }


def _outcome(outcome: Outcome) -> Json:
    """Output as text; what is none is shown as well as it can be."""
    answer = outcome.answer
    told: Json = {
        "node_id": outcome.board,
        "state": outcome.state.value,
        "success": answer is not None and answer.success,
        "message": outcome.detail,
    }
    if answer is not None:
        told |= {
            "exit_code": answer.exit_code,
            "stdout": answer.stdout.decode("utf-8", "replace"),
            "stderr": answer.stderr.decode("utf-8", "replace"),
            "stdout_truncated": answer.stdout_truncated,
            "stderr_truncated": answer.stderr_truncated,
            "started_at": spelled_or_null(answer.started_at_ns),
            "duration_seconds": round(answer.duration_seconds, 6),
            "timed_out": answer.timed_out,
            "signal": answer.signal,
            "reason": answer.reason,
        }
    return told
