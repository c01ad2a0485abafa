"""Rollouts of sets of boards, and the audience of releases of the boards' agent.

A board has confirmed a version when it reports it as in place: every package of it is installed, every
program was up for some seconds and every pin was driven. Boards whose agents do not supervise programs take
no part. A board asks for releases of its agent with its certificate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleetplane.domains.boards.access import LISTENER, OPERATOR, REPORT
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.commands.courier import BoardCommander, BoardOutcome
from fleetplane.domains.boards.commands.encoding import BoardProgram
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.joining.credentials import board_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, Board, BoardSilence, BoardState
from fleetplane.domains.boards.sets import rules
from fleetplane.domains.boards.sets.delivery import BoardSets, content_of
from fleetplane.domains.boards.sets.rules import BOARD_APPLIED, BOARD_SET, SETS, SUBJECT, set_scope
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.fleet.rollouts.holds import HeldVersions
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.errors import NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, CallContext, Needs


class BoardRegister:
    def __init__(self, store: Store) -> None:
        self._store = store

    def recognise(self, context: CallContext, name: str) -> str:  # noqa: ARG002  # its certificate says it
        """The board whose certificate it is; others who may report are no agents."""
        number = board_of(context.principal)
        if number is None:
            raise PermissionDenied("releases are for the agents of boards")
        return str(number)

    def card(self, agent: str) -> AgentCard | None:
        """A board by its number."""
        board = self._store.get(BOARD, SCOPE, agent)
        if board is None:
            return None
        own = {"role": str(board.spec.role), "architecture": board.spec.architecture}
        return AgentCard(title=board.spec.name, labels={**own, **board.labels})


def _register(_domain: Any, store: Store) -> BoardRegister:
    return BoardRegister(store)


AUDIENCE = ReleaseAudience(
    listener=LISTENER,
    authentication=Authentication.CERTIFICATE,
    permission=REPORT,
    register=_register,
    needs=Needs.WRITES,
)


HEALTHY = "healthy"


class BoardPrograms:
    """The subject `boards.programs`."""

    name = SUBJECT
    domain = "boards"
    summary = "programs, pins and packages of a set of boards; confirmed when the board reports them in place"
    measures: Mapping[str, str] = {
        HEALTHY: "share of boards that report in time and whose programs run, from 0 to 1"
    }
    watches: Sequence[AnyKind] = (BOARD_APPLIED,)
    versions: Sequence[AnyKind] = (BOARD_SET,)

    def __init__(self, store: Store, sets: BoardSets, commander: BoardCommander) -> None:
        self._store = store
        self._sets = sets
        self._commander = commander
        self._held = HeldVersions(store, SUBJECT, content_of)

    def __repr__(self) -> str:
        return f"<BoardPrograms {self._held!r}>"

    # Names.

    def scope(self, text: str) -> str:
        """A set by its name or its scope."""
        name = text.removeprefix(f"{SETS}/")
        if self._store.get(BOARD_SET, SCOPE, name) is None:
            raise NotFound(f"there is no set of boards {text[:80]!r}", hint=f"write its name, or {SETS}/NAME")
        return set_scope(name)

    def scopes(self, below: str) -> Sequence[str]:
        found = (set_scope(one.name) for one in self._store.list(BOARD_SET, SCOPE))
        return [scope for scope in found if not below or scope == below or scope.startswith(f"{below}/")]

    def holder(self, kind: str, _scope: str, name: str) -> str | None:
        """The set itself, as an object of the resource API."""
        return set_scope(name) if kind == "board-set" else None

    def version(self, scope: str, text: str) -> str:
        return self._held.version(scope, text)

    def newest(self, scope: str) -> str:
        return self._held.newest(scope)

    def waiting(self, scope: str) -> str:
        return self._held.waiting(scope)

    def default(self, scope: str) -> str:
        return self._held.default(scope)

    # Targets.

    def targets(self, scope: str) -> Mapping[str, TargetFact]:
        """The boards of a set, in the order of their names."""
        name = scope.removeprefix(f"{SETS}/")
        return {board.name: self._fact(name, board) for board in self._sets.members(name)}

    def _fact(self, name: str, board: Board) -> TargetFact:
        applied = self._sets.applied(name, board)
        online = _is_online(board)
        return TargetFact(
            version=applied.version,
            online=online,
            healthy=online and rules.is_running(applied),
            labels=board.labels,
            title=board.spec.name,
            error=applied.error,
            error_at_ns=applied.failed_at_ns,
            error_version=applied.wanted if applied.error else "",
        )

    # Moving.

    async def steer(
        self, scope: str, versions: Mapping[str, str], *, rollout: str, default: str = ""
    ) -> None:
        assert rollout
        await self._held.steer(scope, versions, default=default)

    async def again(self, scope: str, targets: Collection[str]) -> None:
        await self._sets.again(scope.removeprefix(f"{SETS}/"), {int(name) for name in targets})

    async def settle(self, scope: str, version: str, *, rollout: str, held: bool) -> None:
        assert rollout
        await self._held.settle(scope, version, held=held)

    # Gates.

    async def measure(
        self, scope: str, _query: str, targets: Collection[str], _period: Period
    ) -> float | None:
        if not targets:
            return None
        name = scope.removeprefix(f"{SETS}/")
        boards = (self._store.get(BOARD, SCOPE, one) for one in targets)
        good = sum(board is not None and self._fact(name, board).healthy for board in boards)
        return good / len(targets)

    async def probe(
        self, _scope: str, targets: Collection[str], command: Sequence[str], *, seconds: float
    ) -> Mapping[str, int | None]:
        """Run a program on boards, as their own configurations allow; the exit code of each."""
        order = BoardProgram(command=command[0], args=tuple(command[1:]), timeout_seconds=seconds)
        asked = CallOrigin(actor=ACTOR, role=OPERATOR)
        issued = await self._commander.execute(order, [int(name) for name in targets], asked=asked)
        return {str(one.board): _exit_code(one) for one in await self._commander.finished(issued)}


def _is_online(board: Board) -> bool:
    status = status_of(board)
    return status.silence is BoardSilence.NONE and status.reported is not BoardState.MAINTENANCE


def _exit_code(outcome: BoardOutcome) -> int | None:
    """Of a program that ran to its end; whatever else became of it is no exit code."""
    answer = outcome.answer
    if answer is None or answer.timed_out or answer.signal or answer.started_at_ns is None:
        return None
    return answer.exit_code
