"""Sets of boards: what the boards of a selector are to run and to drive, and what each of them has of it.

A set is stored under its name in the scope `boards`; what boards have of it lies at `boards/set/NAME`, which
is also the scope of its rollouts. A board belongs to one set at most (see `rules.chosen`).
"""

from __future__ import annotations

import msgspec

from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.kernel.resources import Kind, Nothing, Resource

SUBJECT = "boards.programs"
SETS = f"{SCOPE}/set"


def set_scope(name: str) -> str:
    """Where the rollouts of a set lie, and what its boards report."""
    return f"{SETS}/{name}"


class ProgramSpec(BoardsSpec, frozen=True):
    """A program that is kept running. No shell: nothing is expanded or split."""

    name: str
    """Unique in its set."""
    command: str
    """An absolute path, which the board's own configuration must allow."""
    args: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    working_dir: str = ""
    up_seconds: float = 2.0
    """It is up once it has run so long; one that ends before has failed to start."""


class PinLevelSpec(BoardsSpec, frozen=True):
    """An output and its level."""

    pin: int
    """As the processor counts them (BCM)."""
    level: int
    """0 or 1."""


class PackageSpec(BoardsSpec, frozen=True):
    """A Debian package that is to be installed."""

    name: str
    """Which the board's own configuration must allow."""
    version: str = ""
    """Exactly this one; empty for whichever is there, or the newest that apt knows."""


class BoardSetSpec(BoardsSpec, frozen=True):
    selector: str = ""
    """Which boards; empty for all."""
    priority: int = 0
    """A board that several sets select belongs to the one with the highest."""
    description: str = ""
    programs: tuple[ProgramSpec, ...] = ()
    pins: tuple[PinLevelSpec, ...] = ()
    packages: tuple[PackageSpec, ...] = ()


class DesiredContent(BoardsSpec, frozen=True):
    """What of a set is versioned, as it is stored for each version; no field may be renamed."""

    programs: tuple[ProgramSpec, ...] = ()
    pins: tuple[PinLevelSpec, ...] = ()
    packages: tuple[PackageSpec, ...] = ()
    """Not written if there are none: a version from before there were any keeps its name."""


class AppliedPackage(BoardsSpec, frozen=True):
    name: str
    version: str = ""
    """As dpkg has it; empty if it is not installed."""


class AppliedProgram(BoardsSpec, frozen=True):
    name: str
    running: bool
    exit_code: int = 0
    restarts: int = 0


class AppliedSpec(BoardsSpec, frozen=True):
    """One board's part in a set."""

    board: int
    again: bool = False
    """It is to try once more what it could not take; said here where several servers share a database."""


class AppliedStatus(BoardsSpec, frozen=True):
    """What a board has of its set, by its own word."""

    version: str = ""
    """In place: its programs were up, and its pins were driven."""
    wanted: str = ""
    """The version that it was sent last, taken or refused."""
    error: str = ""
    """Why that is not in place, or which of its programs ended."""
    failures: int = 0
    """Grows with each try that failed."""
    failed_at_ns: int = 0
    """When the last of them was heard of."""
    programs: tuple[AppliedProgram, ...] = ()
    packages: tuple[AppliedPackage, ...] = ()


BoardSet = Resource[BoardSetSpec, Nothing]
Applied = Resource[AppliedSpec, AppliedStatus]

BOARD_SET: Kind[BoardSetSpec, Nothing] = Kind("board-set", BoardSetSpec, Nothing, is_secret=True)
BOARD_APPLIED: Kind[AppliedSpec, AppliedStatus] = Kind(
    "board-applied", AppliedSpec, AppliedStatus, is_secret=True
)
KINDS = (BOARD_SET, BOARD_APPLIED)
