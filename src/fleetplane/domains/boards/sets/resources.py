"""Sets of boards in the resource API, their rollouts, and the audience of releases of the boards' agent.

A board has confirmed a version when it reports it as in place: every package of it is installed, every
program was up for some seconds and every pin was driven. Boards whose agents do not supervise programs take
no part. A board asks for releases of its agent with its certificate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.domains.boards import access
from fleetplane.domains.boards.access import LISTENER, OPERATOR, REPORT
from fleetplane.domains.boards.calls.channels import CallOrigin
from fleetplane.domains.boards.commands.courier import BoardCommander, BoardOutcome
from fleetplane.domains.boards.commands.encoding import BoardProgram
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.joining.credentials import board_of
from fleetplane.domains.boards.kinds import BOARD, SCOPE, Board, BoardSilence, BoardState
from fleetplane.domains.boards.resources import MIRROR, TENANT, at_tenant
from fleetplane.domains.boards.sets import rules
from fleetplane.domains.boards.sets.delivery import BoardSets, content_of
from fleetplane.domains.boards.sets.rules import (
    BOARD_APPLIED,
    BOARD_SET,
    SETS,
    SUBJECT,
    BoardSet,
    BoardSetSpec,
    PackageSpec,
    PinLevelSpec,
    ProgramSpec,
    set_scope,
)
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.releases.check_in import AgentCard
from fleetplane.fleet.resources.declaration import (
    READING,
    Column,
    PublicResource,
    ResourceShape,
    ResourceView,
    ViewReader,
    Writable,
    WriteCall,
)
from fleetplane.fleet.rollouts.holds import HeldVersions, digest, running
from fleetplane.fleet.rollouts.records import Period
from fleetplane.fleet.rollouts.rules.passes import ACTOR
from fleetplane.fleet.rollouts.rules.states import TargetFact
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.resources import AnyKind, AnyResource
from fleetplane.kernel.store import Draft, Store
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


PROBLEMS_LIMIT = 20
"""Boards that are named with what is wrong with them."""
ProgramView = MIRROR.shape(ProgramSpec)
PinLevelView = MIRROR.shape(PinLevelSpec)
PackageView = MIRROR.shape(PackageSpec)


class BoardSetSpecView(ResourceShape, frozen=True, forbid_unknown_fields=True):
    selector: str = ""
    """Which boards: by labels, name, role, cluster, architecture or model; empty for all."""
    priority: int = 0
    """A board that several sets select belongs to the one with the highest, then to the first by name."""
    description: str = ""
    programs: tuple[ProgramView, ...] = ()  # type: ignore[valid-type]  # made at run time
    """Kept running on every board of the set, as far as the board's own configuration allows them."""
    pins: tuple[PinLevelView, ...] = ()  # type: ignore[valid-type]  # made at run time
    """Driven as outputs on every board of the set."""
    packages: tuple[PackageView, ...] = ()  # type: ignore[valid-type]  # made at run time
    """Debian packages, installed on every board of the set as far as its own configuration allows them."""


class BoardSetStatusView(ResourceShape, frozen=True):
    version: str
    """Of programs, pins and packages as they are written here; boards may be held at another by a rollout."""
    boards: int
    """That report what they have of the set."""
    in_place: int
    """Of those, with this very version in place."""
    problems: Mapping[str, str]
    """By board, why what it was sent is not in place, or which program ended; of the first twenty."""


def set_view(found: BoardSet, reading: ViewReader) -> ResourceView[BoardSetSpecView, BoardSetStatusView]:
    """What is shown of a set."""
    spec, version = found.spec, digest(rules.encoded(found.spec))
    reports = [(one.name, one.status) for one in reading.list(BOARD_APPLIED, set_scope(found.name))]
    failing = [(name, status.error) for name, status in reports if status is not None and status.error]
    problems = {}
    for name, error in failing[:PROBLEMS_LIMIT]:
        board = reading.get(BOARD, SCOPE, name)
        problems[board.spec.name if board is not None else name] = error
    return ResourceView(
        spec=BoardSetSpecView(
            selector=spec.selector,
            priority=spec.priority,
            description=spec.description,
            programs=tuple(MIRROR.shown(one) for one in spec.programs),
            pins=tuple(MIRROR.shown(one) for one in spec.pins),
            packages=tuple(MIRROR.shown(one) for one in spec.packages),
        ),
        status=BoardSetStatusView(
            version=version,
            boards=len(reports),
            in_place=sum(status is not None and status.version == version for _, status in reports),
            problems=problems,
        ),
    )


def find_set(_domain: object, draft: Draft, scope: str, name: str) -> BoardSet | None:
    """By its name."""
    if scope != TENANT:
        raise InvalidArgument(f"sets of boards lie at {TENANT}, not at {scope}", field="scope")
    return draft.get(BOARD_SET, SCOPE, name)


def put_set(call: WriteCall) -> BoardSet:
    """Write what the boards of a selector are to run and to drive."""
    given: BoardSetSpecView = call.spec
    spec = BoardSetSpec(
        selector=given.selector,
        priority=given.priority,
        description=given.description,
        programs=tuple(MIRROR.stored(one) for one in given.programs),
        pins=tuple(MIRROR.stored(one) for one in given.pins),
        packages=tuple(MIRROR.stored(one) for one in given.packages),
    )
    return call.draft.put(BOARD_SET, SCOPE, call.name, spec=rules.checked(call.name, spec))


def delete_set(call: WriteCall) -> None:
    """Delete a set: its boards end its programs, release its pins and take its packages back, at once."""
    assert call.stored is not None
    if under_way := running(call.draft, SUBJECT, set_scope(call.stored.name)):
        raise FailedPrecondition(
            f"rollout {under_way[0].name} of it has not ended", hint="abort or undo that first"
        )
    call.draft.delete(BOARD_SET, SCOPE, call.stored.name)


def disturbs(before: AnyResource | None, after: AnyResource | None, _reading: ViewReader) -> Sequence[str]:
    """What happens on boards."""
    if after is None:
        return ("its boards end its programs, release its pins and take its packages back",)
    if before is None:
        return ()
    old, new = _programs(before), _programs(after)
    ended = sorted(name for name, program in old.items() if new.get(name) != program)
    had, have = ({one.name: one.version for one in stored.spec.packages} for stored in (before, after))
    return (
        *(f"boards end program {name}{', and start it anew' if name in new else ''}" for name in ended),
        *(f"boards take package {name} back" for name in sorted(had.keys() - have.keys())),
    )


def _programs(stored: AnyResource) -> Mapping[str, msgspec.Struct]:
    return {one.name: one for one in stored.spec.programs}


BOARD_SETS = PublicResource(
    name="board-set",
    plural="board-sets",
    summary="Programs that the boards of a selector run, pins that they drive, packages that they have",
    kind=BOARD_SET,
    spec=BoardSetSpecView,
    status=BoardSetStatusView,
    view=set_view,
    place=at_tenant,
    permission=access.READ,
    columns=(
        Column(title="NAME", value=".metadata.name"),
        Column(title="SELECTOR", value=".spec.selector"),
        Column(title="BOARDS", value=".status.boards", type="number"),
        Column(title="IN PLACE", value=".status.inPlace", type="number"),
        Column(title="PRIORITY", value=".spec.priority", type="number", wide=True),
        Column(title="VERSION", value=".status.version", wide=True),
    ),
    verbs=READING,
)
SET_WRITERS: Mapping[str, Writable] = {
    "board-set": Writable(
        anywhere=True,
        permission=access.OPERATE,
        find=find_set,
        put=put_set,
        delete=delete_set,
        rank=22,
        disturbs=disturbs,
    )
}
