"""Sets of boards as objects of the resource API: read, written, planned and applied like all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fleetplane.domains.boards import access
from fleetplane.domains.boards.kinds import BOARD, SCOPE
from fleetplane.domains.boards.resources import MIRROR, TENANT, at_tenant
from fleetplane.domains.boards.sets import rules
from fleetplane.domains.boards.sets.rules import (
    BOARD_APPLIED,
    BOARD_SET,
    SUBJECT,
    BoardSet,
    BoardSetSpec,
    PackageSpec,
    PinLevelSpec,
    ProgramSpec,
    set_scope,
)
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
from fleetplane.fleet.rollouts.holds import digest, running
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Draft

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
