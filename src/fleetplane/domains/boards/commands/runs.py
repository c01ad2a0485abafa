"""Runs on boards, and the selection of boards by selector or by the fields of `/exec`.

A board is selected by its labels, and by `id`, `name`, `role`, `status`, `cluster` (its number or its name),
`architecture` and `model`. A label with one of these names is written `label/NAME`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import msgspec

from fleetplane.domains.boards.commands.courier import (
    GRACE_SECONDS,
    PATIENCE_SECONDS,
    REACH_SECONDS,
    VERB,
    BoardCommander,
)
from fleetplane.domains.boards.commands.encoding import TIMEOUT_LIMIT_SECONDS, BoardProgram, encoded_order
from fleetplane.domains.boards.inventory.boards import Boards, status_of
from fleetplane.domains.boards.kinds import Board, BoardRole, BoardState
from fleetplane.fleet.runs import records
from fleetplane.fleet.runs.channel import CommandIssue, RunChannel, RunOrder
from fleetplane.fleet.runs.records import RunKind, RunSpec, RunStatus
from fleetplane.fleet.runs.runs import Runs
from fleetplane.fleet.runs.targets import RunTarget, Skipped, TargetCandidate, choose
from fleetplane.fleet.selectors import LABEL, Facts, Requirement, Selector, facts_of
from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Kind


def facts(board: Board, clusters: Mapping[int, str]) -> Facts:
    """What a board can be selected by; `clusters` has the names of clusters."""
    spec = board.spec
    cluster = spec.cluster_id
    own: dict[str, str | tuple[str, ...]] = {
        "id": board.name,
        "name": spec.name,
        "role": spec.role,
        "status": status_of(board).state,
        "cluster": () if cluster is None else (str(cluster), clusters.get(cluster, str(cluster))),
        "architecture": spec.architecture,
        "model": spec.model,
    }
    return facts_of(board.labels, own)


class Selection(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """All that is given must fit; nothing given fits nobody, unless `all` is said."""

    node_ids: list[int] = []
    cluster_id: int | None = None
    role: BoardRole | None = None
    status: BoardState | None = None
    labels: dict[str, str] = {}
    all: bool = False

    def selector(self) -> Selector:
        """The selection as a selector of the one language."""
        if not self.all and not any((self.node_ids, self.cluster_id, self.role, self.status, self.labels)):
            raise InvalidArgument(
                "is required; name boards, a cluster or labels, or set `all`", field="target"
            )
        return Selector(tuple(self._requirements()))

    def _requirements(self) -> Iterator[Requirement]:
        if self.node_ids:
            yield Requirement("id", True, frozenset(map(str, self.node_ids)))
        if self.cluster_id is not None:
            yield Requirement("cluster", True, frozenset({str(self.cluster_id)}))
        if self.role is not None:
            yield Requirement("role", True, frozenset({self.role.value}))
        if self.status is not None:
            yield Requirement("status", True, frozenset({self.status.value}))
        for key, value in self.labels.items():
            yield Requirement(LABEL + key, True, frozenset({value}))


class BoardRunSpec(RunSpec, frozen=True):
    """As it is stored: no field may be renamed."""

    target: RunTarget
    order: BoardProgram


BOARD_RUN: RunKind[BoardRunSpec] = Kind("board-run", BoardRunSpec, RunStatus, is_secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """A program, and with which role's rights boards are asked to run it."""

    order: BoardProgram
    role: Role


BoardRun: TypeAlias = records.Run[BoardRunSpec]
BoardRuns: TypeAlias = Runs[BoardRunSpec, RunTarget, ProgramCall]
ProgramOrder: TypeAlias = RunOrder[RunTarget, ProgramCall]


class BoardChannel(RunChannel[BoardRunSpec, RunTarget, ProgramCall]):
    domain = "boards"
    kind = BOARD_RUN
    nobody = "no board that is meant can be reached"

    def __init__(
        self, *, boards: Boards, commander: BoardCommander, clusters: Callable[[], Mapping[int, str]]
    ) -> None:
        """`clusters` has the names of clusters by number."""
        self._boards = boards
        self._commander = commander
        self._clusters = clusters
        self.ledger = commander.ledger

    def candidates(
        self, _scope: str, target: RunTarget
    ) -> tuple[Sequence[TargetCandidate], Sequence[Skipped]]:
        clusters = self._clusters()
        numbers: dict[str, str] = {}
        fleet: dict[str, Callable[[], Facts]] = {}
        for board in self._boards.all():
            numbers.setdefault(board.spec.name, board.name)
            fleet[board.name] = partial(facts, board, clusters)
        # A number is a number, also where a board is called like another one's.
        named = tuple(name if name in fleet else numbers.get(name, name) for name in target.names)
        chosen, missing = choose(msgspec.structs.replace(target, names=named), fleet)
        return [TargetCandidate(name=name) for name in chosen], missing

    def is_present(self, name: str) -> bool:
        return self._commander.is_reachable(name)

    def issue(self, order: ProgramOrder) -> CommandIssue:
        policy = order.policy
        if policy.deadline_seconds > TIMEOUT_LIMIT_SECONDS:
            raise InvalidArgument(
                f"must be above 0 and at most {TIMEOUT_LIMIT_SECONDS:g} seconds",
                field="policy.deadline_seconds",
            )
        patience = PATIENCE_SECONDS if policy.wait else REACH_SECONDS
        asked = self._program(order)
        return CommandIssue(
            verb=VERB,
            payload=encoded_order(asked.checked(), str(order.call.role)),
            run_for_seconds=patience + asked.timeout_seconds + GRACE_SECONDS,
            repeatable=False,  # a program reaches a board at most once
        )

    def spec(self, order: ProgramOrder, common: RunSpec) -> BoardRunSpec:
        return BoardRunSpec(
            **msgspec.structs.asdict(common),
            target=order.target,
            order=_without_secrets(self._program(order)),
        )

    def _program(self, order: ProgramOrder) -> BoardProgram:
        return msgspec.structs.replace(order.call.order, timeout_seconds=order.policy.deadline_seconds)


def _without_secrets(program: BoardProgram) -> BoardProgram:
    """What is remembered of a program: not its input nor the values of its variables, often passwords."""
    return msgspec.structs.replace(program, stdin=b"", environment=dict.fromkeys(program.environment, ""))
