"""Diagnostic commands on boards: issued through the outcome ledger, delivered by calls to the agents.

Cancelling a command ends its call, which makes the agent end the program. A command reaches a board at most
once. The board decides what it may run at all.

One of several servers delivers: the leader. When a server becomes leader it updates a record in the store,
and the revision of that record is the session of every board until the next leader does the same. So any
server issues and cancels commands; those of a dead leader are lost with its sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from fleetplane.domains.boards.calls.channels import CallOrigin, NodeLinks
from fleetplane.domains.boards.calls.errors import BoardSilent, BoardUnreachable
from fleetplane.domains.boards.commands.encoding import (
    BoardProgram,
    ProgramAnswer,
    answer_of,
    decoded_order,
    encoded_order,
    encoded_result,
    stored_answer,
)
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, Board, BoardSilence
from fleetplane.fleet.streams.courier import Answered, CallCourier
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import Command, CommandLimits, Commands, CommandState, CommandTarget
from fleetplane.kernel.commands.sessions import SessionReader
from fleetplane.kernel.errors import FleetplaneError, NotFound
from fleetplane.kernel.resources import Kind, Nothing, Resource
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Draft, Store

ACTOR = "system/boards"
NAME = "commands"
BOARD_CALLER: Kind[Nothing, Nothing] = Kind("board-caller", Nothing, Nothing)


class CallingServer:
    """Keeps `kernel.commands.sessions.Places`."""

    def __init__(self, store: Store, is_callable: Callable[[Board], bool]) -> None:
        self._store = store
        self._is_callable = is_callable
        self._session: int | None = None

    def __repr__(self) -> str:
        return f"<CallingServer session={self._session}>"

    @property
    def shared(self) -> bool:
        return self._store.shared

    async def begin(self) -> None:
        """From now on this server calls boards."""
        if not self.shared:
            return

        def change(draft: Draft) -> Resource[Nothing, Nothing]:
            return draft.put(BOARD_CALLER, SCOPE, NAME, spec=Nothing(), renew=True)

        done = await self._store.transact(
            change, actor=ACTOR, action="boards.call", touches=[BOARD_CALLER.key(SCOPE, NAME)]
        )
        self._session = done.value.revision

    def session_here(self, agent: str) -> int | None:
        """The session of a board that this server calls."""
        if self._session is None or self.named(self._store, agent) is None:
            return None
        return self._session

    def named(self, reader: SessionReader, agent: str) -> int | None:
        """The session that counts; None for a board that cannot be called."""
        board = reader.get(BOARD, SCOPE, agent)
        caller = reader.get(BOARD_CALLER, SCOPE, NAME)
        if board is None or caller is None or not self._is_callable(board):
            return None
        return caller.revision


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


ORIGINAL_AGENT: Final = (
    "the board runs an original agent, which cannot run programs: install `fleetplane agent board` on it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardOutcome:
    """What a command came to on one board."""

    board: int
    state: CommandState
    detail: str
    answer: ProgramAnswer | None = None


class BoardCommander:
    """Issues commands to boards through the ledger, and delivers them by calling each board."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        boards: Boards,
        links: NodeLinks,
        attention: StallDetector | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._attention = attention
        self._boards = boards
        self._links = links
        self._answers: OrderedDict[tuple[str, str], ProgramAnswer] = OrderedDict()
        self._answers_bytes = 0
        self.courier = CallCourier(
            channel=CHANNEL, per_target=PER_BOARD, at_once=AT_ONCE, is_present=self._is_there, call=self._call
        )
        self._calling = CallingServer(store, self._is_callable)
        self.ledger = Commands(
            store,
            clock,
            channel=CHANNEL,
            courier=self.courier,
            limits=CommandLimits(),
            whereabouts=self._calling,
        )

    def __repr__(self) -> str:
        return f"<Commander {self.ledger!r} {self.courier!r}>"

    # For whoever wants something run.

    async def execute(
        self, order: BoardProgram, boards: Sequence[int], *, asked: CallOrigin, wait_seconds: float = 0.0
    ) -> Command:
        """Have it run on all of these; what came of it is found in the ledger, by watching or `outcomes`.

        Boards that are away have `wait_seconds` to come back; without, the command is undeliverable there.
        """
        order = order.checked()
        for number in boards:
            self._boards.require(number, field="boards")
        patience = PATIENCE_SECONDS if wait_seconds > 0 else REACH_SECONDS
        command = await self.ledger.issue(
            SCOPE,
            VERB,
            [str(number) for number in boards],
            actor=asked.actor,
            payload=encoded_order(order, str(asked.role)),
            wait=wait_seconds > 0,
            deliver_within_seconds=wait_seconds or GRACE_SECONDS + order.timeout_seconds,
            run_for_seconds=patience + order.timeout_seconds + GRACE_SECONDS,
            repeatable=False,
        )
        log.info("boards.command", command=command.name, actor=asked.actor, boards=len(boards))
        return command

    async def cancel(self, command: str, *, actor: str) -> Command:
        """Take it back wherever it has no outcome yet; what runs is ended."""
        return await self.ledger.cancel(SCOPE, command, actor=actor)

    async def finished(self, command: Command) -> list[BoardOutcome]:
        """Wait until every board has its outcome."""
        return self.outcomes(await self.ledger.finished(command))

    def outcomes(self, command: Command) -> list[BoardOutcome]:
        """As they stand, by board."""
        found = [self.outcome(target) for target in self.ledger.targets(command)]
        return sorted(found, key=lambda outcome: outcome.board)

    def outcome(self, target: CommandTarget) -> BoardOutcome:
        """What is known of one board; its whole output, while that is in memory."""
        assert target.status is not None
        status = target.status
        answer = self._answers.get((target.spec.target, target.spec.command))
        return BoardOutcome(
            board=int(target.spec.target),
            state=status.state,
            detail=status.detail,
            answer=answer or stored_answer(status.result),
        )

    def is_reachable(self, target: str) -> bool:
        """Whether a command would be sent to a board now, by whichever server calls boards."""
        if self._calling.shared:
            return self._calling.named(self._store, target) is not None
        return self.courier.is_present(target)

    # For the courier.

    def _is_there(self, target: str) -> bool:
        board = self._boards.get(int(target))
        return board is not None and self._is_callable(board)

    def _is_callable(self, board: Board) -> bool:
        status = status_of(board)
        if status.speaks_original:
            return True  # it takes none, and says so at once: that it is away would not be why
        return status.silence is BoardSilence.NONE and self._links.is_callable(board)

    # Carrying.

    async def prepare_here(self) -> None:
        """Take up what is open: every server issues commands and tells of them."""
        self.ledger.recover()

    async def take_over(self) -> None:
        """Call boards from now on. For what an earlier server left under way nobody will answer any more."""
        await self._calling.begin()
        await self.ledger.all_lost()

    async def run_here(self) -> None:
        """Learn what becomes of commands, until cancelled."""
        await self.ledger.run_here()

    async def run_active(self) -> None:
        """Until cancelled; what is under way then is ended on the boards as well."""
        await self.courier.run(self.ledger, self._clock, self._attention)

    async def arrived(self, board: int) -> None:
        """Send what waited for it."""
        await self.ledger.arrived(str(board))

    async def removed(self, board: int) -> None:
        await self.ledger.removed(str(board))

    async def _call(self, target: str, command: Command) -> Answered | None:
        try:
            order, role = decoded_order(command.spec.payload)
        except msgspec.MsgspecError as error:
            log.error("boards.command_unusable", command=command.name, error=str(error))
            return Answered(state=CommandState.FAILED, detail="the command cannot be read")
        asked = CallOrigin(actor=command.spec.actor, role=Role(role))
        patience = PATIENCE_SECONDS if command.spec.wait else REACH_SECONDS
        request = order.request(request_id=command.name)
        try:
            if status_of(self._boards.require(int(target))).speaks_original:
                return Answered(state=CommandState.FAILED, detail=ORIGINAL_AGENT)
            await self._reach(int(target), patience)
            said = await self._links.call(
                int(target),
                lambda link: link.node.ExecuteCommand,
                request,
                pb.CommandResponse,
                asked=asked,
                seconds=order.timeout_seconds + GRACE_SECONDS,
            )
        except NotFound:  # the board was deleted meanwhile, and with it this target
            return None
        except BoardSilent as error:
            return Answered(state=CommandState.TIMED_OUT, detail=error.message)
        except FleetplaneError as error:
            return Answered(state=CommandState.FAILED, detail=error.message)
        answer = answer_of(said)
        self._remember(target, command.name, answer)
        return Answered(state=answer.state, detail=answer.message, result=encoded_result(answer))

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

    def _remember(self, target: str, command: str, answer: ProgramAnswer) -> None:
        self._answers[target, command] = answer
        self._answers_bytes += answer.size
        while self._answers_bytes > ANSWERS_LIMIT_BYTES:
            _, oldest = self._answers.popitem(last=False)
            self._answers_bytes -= oldest.size
