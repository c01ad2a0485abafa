"""Commands for diagnosis on boards: issued through the outcome ledger, carried by calls to the agents.

A call is a command under way: when it ends, the target has its outcome, and taking the command back
ends the call, which makes the agent end the program. A command reaches a board at most once. What a
board may run at all is decided on the board.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from fleetplane.domains.boards.command_texts import (
    Answer,
    Order,
    answer_of,
    decoded_order,
    encoded_order,
    encoded_result,
    stored_answer,
)
from fleetplane.domains.boards.kinds import SCOPE, Silence
from fleetplane.domains.boards.node_faults import AWAY, BoardSilent, BoardUnreachable
from fleetplane.domains.boards.node_link import Asked, NodeLinks
from fleetplane.domains.boards.registry import Boards, status_of
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, CommandLimits, Commands, CommandTarget, State, run
from fleetplane.kernel.errors import FleetplaneError, NotFound
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

CHANNEL: Final = "boards"
VERB: Final = "execute"
PER_BOARD: Final = 2
"""As many as an agent runs at once."""
AT_ONCE: Final = 256
"""Calls in all; a command to thousands of boards goes out in waves."""
GRACE_SECONDS: Final = 10.0
"""Beyond a command's own time: to end it, and for the answer's way back."""
REACH_SECONDS: Final = 5.0
"""For the connection, before anything is sent."""
PATIENCE_SECONDS: Final = 60.0
"""For it, if the command may wait: a board that has just registered may not listen yet."""
ANSWERS_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""Of whole outputs that are kept in memory; the oldest go first, and what the ledger keeps remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command came to on one board."""

    board: int
    state: State
    detail: str
    answer: Answer | None = None


class Commander:
    """The courier of the channel `boards`, and the way in for whoever wants something run."""

    def __init__(self, store: Store, clock: Clock, *, boards: Boards, links: NodeLinks) -> None:
        self._clock = clock
        self._boards = boards
        self._links = links
        self._flights: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Calls under way, by board and command."""
        self._per_board: Counter[str] = Counter()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        """Boards that had room themselves when there was none in all."""
        self._answers: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._answers_bytes = 0
        self._tasks: asyncio.TaskGroup | None = None
        self.ledger = Commands(store, clock, channel=CHANNEL, courier=self, limits=CommandLimits())

    def __repr__(self) -> str:
        return f"<Commander {self.ledger!r} under_way={len(self._flights)}>"

    # For whoever wants something run.

    async def execute(
        self, order: Order, boards: Sequence[int], *, asked: Asked, wait_seconds: float = 0.0
    ) -> Command:
        """Have it run on all of these; what came of it is found in the ledger, by watching or `outcomes`.

        Boards that are away have `wait_seconds` to come back; without, the command is undeliverable there.
        """
        order = order.checked()
        for number in boards:
            self._boards.require(number, field="boards")
        patience = PATIENCE_SECONDS if wait_seconds > 0 else REACH_SECONDS
        command = await self.ledger.issue(
            SCOPE, VERB, [str(number) for number in boards], actor=asked.actor,
            payload=encoded_order(order, str(asked.role)), wait=wait_seconds > 0,
            deliver_within_seconds=wait_seconds or GRACE_SECONDS + order.timeout_seconds,
            run_for_seconds=patience + order.timeout_seconds + GRACE_SECONDS, repeatable=False,
        )  # fmt: skip
        log.info("boards.command", command=command.name, actor=asked.actor, boards=len(boards))
        return command

    async def cancel(self, command: str, *, actor: str) -> Command:
        """Take it back wherever it has no outcome yet; what runs is ended."""
        return await self.ledger.cancel(SCOPE, command, actor=actor)

    async def finished(self, command: Command) -> list[Outcome]:
        """Wait until every board has its outcome."""
        return self.outcomes(await self.ledger.finished(command))

    def outcomes(self, command: Command) -> list[Outcome]:
        """As they stand, by board."""
        found = [self._outcome(target) for target in self.ledger.targets(command)]
        return sorted(found, key=lambda outcome: outcome.board)

    def _outcome(self, target: CommandTarget) -> Outcome:
        assert target.status is not None
        status = target.status
        answer = self._answers.get((target.spec.target, target.spec.command))
        return Outcome(
            board=int(target.spec.target),
            state=status.state,
            detail=status.detail,
            answer=answer or stored_answer(status.result),
        )

    # For the ledger.

    def is_present(self, target: str) -> bool:
        board = self._boards.get(int(target))
        if board is None or self._tasks is None:
            return False
        status = status_of(board)
        return status.silence is Silence.NONE and not status.plaintext and self._links.is_callable(board)

    def has_room(self, target: str) -> bool:
        if self._per_board[target] >= PER_BOARD:
            return False
        if len(self._flights) >= AT_ONCE:
            self._waiting[target] = None
            return False
        return True

    def deliver(self, target: str, command: Command) -> bool:
        if self._tasks is None or not self.is_present(target) or not self.has_room(target):
            return False
        try:
            order, role = decoded_order(command.spec.payload)
        except msgspec.MsgspecError as error:
            log.error("boards.command_unusable", command=command.name, error=str(error))
            return False
        asked = Asked(actor=command.spec.actor, role=Role(role))
        patience = PATIENCE_SECONDS if command.spec.wait else REACH_SECONDS
        self._per_board[target] += 1
        flight = self._tasks.create_task(
            self._carry(target, command.name, order, asked, patience),
            name=f"boards/command/{command.name}/{target}",
        )
        self._flights[target, command.name] = flight
        return True

    def recall(self, target: str, command: str, reason: str) -> None:  # noqa: ARG002  # agents are told by the call's end
        flight = self._flights.get((target, command))
        if flight is not None:
            flight.cancel()

    # Carrying.

    async def prepare(self) -> None:
        """What an earlier run left under way: nobody will answer for it any more."""
        self.ledger.recover()
        await self.ledger.all_lost()

    async def run(self) -> None:
        """Until cancelled; what is under way then is ended on the boards as well."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await run(self.ledger, self._clock)
            finally:
                self._tasks = None

    async def arrived(self, board: int) -> None:
        """Send what waited for it."""
        await self.ledger.arrived(str(board))

    async def removed(self, board: int) -> None:
        await self.ledger.removed(str(board))

    async def _carry(self, target: str, command: str, order: Order, asked: Asked, patience: float) -> None:
        try:
            await self._call(target, command, order, asked, patience)
        finally:
            del self._flights[target, command]
            self._per_board[target] -= 1
            if not self._per_board[target]:
                del self._per_board[target]
        await self._room_for_others(target)

    async def _call(self, target: str, command: str, order: Order, asked: Asked, patience: float) -> None:
        request = order.request(request_id=command)
        try:
            await self._reach(int(target), patience)
            said = await self._links.call(
                int(target), lambda link: link.node.ExecuteCommand, request, pb.CommandResponse, asked=asked,
                seconds=order.timeout_seconds + GRACE_SECONDS,
            )  # fmt: skip
        except NotFound:  # the board was deleted meanwhile, and with it this target
            return
        except BoardSilent as error:
            await self._tell(target, command, State.TIMED_OUT, error.message)
        except AWAY as error:
            await self._tell(target, command, State.FAILED, error.message)
        except FleetplaneError as error:
            await self._tell(target, command, State.FAILED, error.message)
        except Exception as error:  # a defect must cost this command its outcome, and no other
            log.exception("boards.command_broken", command=command, board=target)
            await self._tell(target, command, State.FAILED, f"{type(error).__name__}: {error}"[:256])
        else:
            answer = answer_of(said)
            self._remember(target, command, answer)
            await self._tell(target, command, answer.state, answer.message, encoded_result(answer))

    async def _reach(self, board: int, patience: float) -> None:
        """Until there is a connection; where the board listens may change meanwhile."""
        give_up = self._clock.monotonic() + patience
        while True:
            try:
                await self._links.reach(board, seconds=min(REACH_SECONDS, patience))
            except BoardUnreachable:
                if self._clock.monotonic() >= give_up:
                    raise
            else:
                return

    async def _tell(
        self, target: str, command: str, outcome: State, detail: str, result: bytes = b""
    ) -> None:
        try:
            await self.ledger.ended(target, command, outcome, detail=detail, result=result)
        except FleetplaneError as error:  # the ledger's own deadline ends it
            log.error("boards.outcome_not_kept", command=command, board=target, error=error.message)

    async def _room_for_others(self, target: str) -> None:
        """One call fewer: this board may have the next, or one that found no room in all."""
        candidates = [target]
        if self._waiting:
            candidates.append(self._waiting.popitem(last=False)[0])
        for name in candidates:
            try:
                await self.ledger.room(name)
            except FleetplaneError as error:
                log.error("boards.command_not_sent", board=name, error=error.message)

    def _remember(self, target: str, command: str, answer: Answer) -> None:
        self._answers[target, command] = answer
        self._answers_bytes += answer.size
        while self._answers_bytes > ANSWERS_LIMIT_BYTES:
            _, oldest = self._answers.popitem(last=False)
            self._answers_bytes -= oldest.size
