"""Sets of boards: how they are stored, what may stand in one, and which boards belong to it. Pure.

A set says what the boards of a selector should run and drive. It is stored under its name in the scope
`boards`; what boards have of it lies at `boards/set/NAME`, which is also the scope of its rollouts. A board
belongs to one set at most (see `chosen`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence

import msgspec

from fleetplane.domains.boards.debian import PACKAGES_LIMIT, check_packages
from fleetplane.domains.boards.kinds import SCOPE, BoardsSpec
from fleetplane.domains.boards.rules import TEXT_LIMIT
from fleetplane.domains.boards.wire.message_json import filled
from fleetplane.fleet import selectors
from fleetplane.fleet.selectors import Facts
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument
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


PROGRAMS_LIMIT = 32
ARGUMENTS_LIMIT, ARGUMENT_LIMIT = 64, 4096
VARIABLES_LIMIT, VALUE_LIMIT = 16, 1024
CONTENT_LIMIT_BYTES = 64 * 1024
"""Of a version: it travels in the answer to a report, and eight of them are kept."""
HEADER = range(28)
"""BCM 0 to 27: what the 40-pin header carries."""
PRIORITY_LIMIT = 1000
UP_LIMIT_SECONDS = 300.0
STATUS = "status"
NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


# What may stand in it.


def checked(name: str, spec: BoardSetSpec) -> BoardSetSpec:
    """The set in its stored spelling, or InvalidArgument naming the field."""
    if NAME.fullmatch(name) is None:
        raise InvalidArgument(
            f"{name[:80]!r} is no name of a set", field="name", hint="write a-z, 0-9 and -, at most 63"
        )
    if spec.selector:
        selectors.check(spec.selector, field="selector")
        if any(one.key == STATUS for one in selectors.parse(spec.selector).requirements):
            raise InvalidArgument(
                "a set does not lose its boards when they are not well: select by something else than status",
                field="selector",
            )
    if abs(spec.priority) > PRIORITY_LIMIT:
        raise InvalidArgument(
            f"is {spec.priority}; write -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}", field="priority"
        )
    if len(spec.description) > TEXT_LIMIT:
        raise InvalidArgument(f"has more than {TEXT_LIMIT} characters", field="description")
    _check_programs(spec.programs)
    check_packages([(one.name, one.version) for one in spec.packages])
    pins = [one.pin for one in spec.pins]
    for at, pin in enumerate(spec.pins):
        if pin.pin not in HEADER or pins.count(pin.pin) > 1:
            raise InvalidArgument(
                f"{pin.pin} is no pin from 0 to 27, or is there twice", field=f"pins[{at}].pin"
            )
        if pin.level not in (0, 1):
            raise InvalidArgument(f"is {pin.level}; write 0 or 1", field=f"pins[{at}].level")
    size = len(encoded(spec))
    if size > CONTENT_LIMIT_BYTES:
        raise InvalidArgument(f"has {size} bytes, more than {CONTENT_LIMIT_BYTES}", field="programs")
    return spec


def _check_programs(programs: Sequence[ProgramSpec]) -> None:
    if len(programs) > PROGRAMS_LIMIT:
        raise InvalidArgument(f"has {len(programs)} entries, more than {PROGRAMS_LIMIT}", field="programs")
    names = [one.name for one in programs]
    for at, one in enumerate(programs):
        field = f"programs[{at}]"
        if NAME.fullmatch(one.name) is None or names.count(one.name) > 1:
            raise InvalidArgument(f"{one.name[:80]!r} is no name, or is there twice", field=f"{field}.name")
        for what, path in (("command", one.command), ("workingDir", one.working_dir)):
            if (path or what == "command") and not _is_path(path):
                raise InvalidArgument(f"{path[:80]!r} is no absolute path", field=f"{field}.{what}")
        if not 0 <= one.up_seconds <= UP_LIMIT_SECONDS:
            raise InvalidArgument(
                f"is {one.up_seconds}; write 0 to {UP_LIMIT_SECONDS:g}", field=f"{field}.upSeconds"
            )
        if len(one.args) > ARGUMENTS_LIMIT or any(not _is_text(arg, ARGUMENT_LIMIT) for arg in one.args):
            raise InvalidArgument(
                f"has at most {ARGUMENTS_LIMIT} entries of {ARGUMENT_LIMIT} characters without NUL",
                field=f"{field}.args",
            )
        if len(one.environment) > VARIABLES_LIMIT or any(
            _VARIABLE.fullmatch(name) is None or not _is_text(value, VALUE_LIMIT)
            for name, value in one.environment.items()
        ):
            raise InvalidArgument(
                f"has at most {VARIABLES_LIMIT} variables of {VALUE_LIMIT} characters without NUL",
                field=f"{field}.environment",
            )


def _is_path(path: str) -> bool:
    return posixpath.isabs(path) and posixpath.normpath(path) == path and _is_text(path, ARGUMENT_LIMIT)


def _is_text(text: str, limit: int) -> bool:
    return len(text) <= limit and "\0" not in text


# Which boards it has.


def ordered(sets: Iterable[BoardSet]) -> Sequence[BoardSet]:
    """Sets in the order in which they are asked whether a board is theirs."""
    return sorted(sets, key=lambda one: (-one.spec.priority, one.name))


def chosen(facts: Facts, sets: Sequence[BoardSet]) -> BoardSet | None:
    """The set that a board belongs to, of sets in order: the first one that selects it."""
    for one in sets:
        if not one.spec.selector or selectors.parse(one.spec.selector).matches(facts):
            return one
    return None


# What a version is.


def encoded(spec: BoardSetSpec | None) -> bytes:
    """What of a set is versioned; the order of programs and pins says nothing."""
    found = spec or BoardSetSpec()
    content = DesiredContent(
        programs=tuple(sorted(found.programs, key=lambda one: one.name)),
        pins=tuple(sorted(found.pins, key=lambda one: one.pin)),
        packages=tuple(sorted(found.packages, key=lambda one: one.name)),
    )
    fields = msgspec.to_builtins(content)
    if not content.packages:
        del fields["packages"]
    return msgspec.json.encode(fields, order="sorted")


def message(name: str, version: str, content: bytes) -> pb.DesiredState:
    """A version as boards are sent it."""
    found = msgspec.json.decode(content, type=DesiredContent)
    return pb.DesiredState(
        set=name,
        version=version,
        programs=[filled(pb.DesiredProgram, one) for one in found.programs],
        pins=[
            pb.DesiredPin(pin=one.pin, state=pb.GPIORequest.HIGH if one.level else pb.GPIORequest.LOW)
            for one in found.pins
        ],
        packages=[filled(pb.DesiredPackage, one) for one in found.packages],
    )


def reported(name: str, said: pb.AppliedState, before: AppliedStatus, *, now_ns: int) -> AppliedStatus:
    """What a board has of a set, after its report; the same as before if it says nothing new."""
    if said.wanted_set != name:  # it was not sent this one yet
        return AppliedStatus()
    error, failures = _shown(said.error), min(said.failures, 2**31)
    is_same = (before.wanted, before.error, before.failures) == (said.wanted[:64], error, failures)
    return AppliedStatus(
        version=said.version[:64] if said.set == name else "",
        wanted=said.wanted[:64],
        error=error,
        failures=failures,
        failed_at_ns=0 if not error else before.failed_at_ns if is_same else now_ns,
        programs=tuple(
            AppliedProgram(
                name=_shown(one.name)[:63],
                running=one.running,
                exit_code=one.exit_code,
                restarts=min(one.restarts, 2**31),
            )
            for one in said.programs[:PROGRAMS_LIMIT]
        ),
        packages=tuple(
            AppliedPackage(name=_shown(one.name)[:100], version=_shown(one.version)[:200])
            for one in said.packages[:PACKAGES_LIMIT]
        ),
    )


def _shown(text: str) -> str:
    """What a board says, fit to be stored and printed."""
    return "".join(one if one.isprintable() else " " for one in text[:TEXT_LIMIT])


def is_running(status: AppliedStatus | None) -> bool:
    """Whether nothing that a board is to run has ended."""
    return status is None or all(one.running for one in status.programs)
