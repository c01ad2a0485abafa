"""What this board is to run, to drive and to have installed: as it is sent, kept and checked.

The server says what; whether it may be so is decided here. Every program must be one that `[programs]` of the
board's configuration names, with arguments in one of the forms that stand there, and every pin one that may
be driven. If anything of a document is refused, nothing of it happens. Pure, but for looking at files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from fleetplane.domains.boards.agent.commands import rules as command_rules
from fleetplane.domains.boards.agent.commands.rules import CommandPolicy, ProgramJob, ProgramRequest
from fleetplane.domains.boards.agent.commands.runs import require_safe
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.kernel.errors import FleetplaneError, IntegrityError, InvalidArgument

PROGRAMS_LIMIT: Final = 32
UP_LIMIT_SECONDS: Final = 300.0


class KeptProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program that is kept running."""

    name: str
    command: str
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}
    working_dir: str = ""
    up_seconds: float = 2.0
    """It is up once it has run so long; one that ends before has failed to start."""


class DesiredDocument(msgspec.Struct, frozen=True, kw_only=True):
    """As it stands on disk: no field may be renamed."""

    set: str = ""
    version: str = ""
    programs: tuple[KeptProgram, ...] = ()
    pins: Mapping[int, int] = {}
    """Levels of outputs by pin."""
    packages: Mapping[str, str] = {}
    """Versions by name; an empty one for any."""


def of_message(message: pb.DesiredState) -> DesiredDocument:
    """What the server sent."""
    return DesiredDocument(
        set=message.set,
        version=message.version,
        programs=tuple(
            KeptProgram(
                name=one.name,
                command=one.command,
                args=tuple(one.args),
                environment=dict(one.environment),
                working_dir=one.working_dir,
                up_seconds=max(0.0, min(one.up_seconds, UP_LIMIT_SECONDS)),
            )
            for one in message.programs
        ),
        pins={one.pin: int(one.state == pb.GPIORequest.HIGH) for one in message.pins},
        packages={one.name: one.version for one in message.packages},
    )


def encoded(desired: DesiredDocument) -> bytes:
    return msgspec.json.encode(desired) + b"\n"


def decoded(raw: bytes) -> DesiredDocument:
    """What was kept on disk, or IntegrityError."""
    try:
        return msgspec.json.decode(raw, type=DesiredDocument)
    except msgspec.MsgspecError as error:
        raise IntegrityError(f"what this board is to run cannot be read: {error}") from error


class KeptJob(msgspec.Struct, frozen=True, kw_only=True):
    """A program as it may be run here."""

    job: ProgramJob
    up_seconds: float


def jobs(desired: DesiredDocument, policy: CommandPolicy) -> Mapping[str, KeptJob]:
    """What to run for each program, by its name; the first one that may not be run raises."""
    names = [one.name for one in desired.programs]
    if len(names) > PROGRAMS_LIMIT or len(names) != len(set(names)):
        raise InvalidArgument(f"there are at most {PROGRAMS_LIMIT} programs, each once", field="programs")
    found = {}
    for one in desired.programs:
        asked = ProgramRequest(
            command=one.command,
            arguments=one.args,
            environment=one.environment,
            working_dir=one.working_dir,
        )
        try:
            job = command_rules.decide(policy, asked, free=False)
            require_safe(job.program)
        except FleetplaneError as error:
            raise type(error)(f"program {one.name}: {error.message}") from error
        found[one.name] = KeptJob(job=job, up_seconds=one.up_seconds)
    return found
