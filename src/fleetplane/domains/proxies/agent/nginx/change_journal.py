"""Which release is trusted and which one is on trial: the states of a change, as a table.

    phase       what is on disk                        what comes next
    LIVE        `live` was seen to answer              nothing is owed
    SWITCHING   `target` may or may not be linked      link it, reload, confirm; else REVERTING
    REVERTING   `target` has failed                    link `live`, reload, confirm; then LIVE

The journal is written before anything it announces is done. An agent that died finds in it what
it was about to do, and does it again: every step may be taken twice. A release becomes `live` only
once it was confirmed, so whatever happens there is one to go back to. Pure, but for two functions
at the end that read and write the file.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

import msgspec

from fleetplane.kernel.durable import write_durably
from fleetplane.kernel.errors import IntegrityError


class Phase(StrEnum):
    LIVE = "live"
    SWITCHING = "switching"
    REVERTING = "reverting"


class Event(StrEnum):
    BEGUN = "begun"
    CONFIRMED = "confirmed"
    FAILED = "failed"


TABLE: Final = {
    (Phase.LIVE, Event.BEGUN): Phase.SWITCHING,
    (Phase.SWITCHING, Event.CONFIRMED): Phase.LIVE,
    (Phase.SWITCHING, Event.FAILED): Phase.REVERTING,
    (Phase.REVERTING, Event.CONFIRMED): Phase.LIVE,
    # The old release does not come up either: it is still the one to trust, and we say so loudly.
    (Phase.REVERTING, Event.FAILED): Phase.LIVE,
}


class State(StrEnum):
    """How far we are with a version, as the wire names it."""

    PENDING = "PENDING"
    VALIDATING = "VALIDATING"
    APPLYING = "APPLYING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    ROLLED_BACK = "ROLLED_BACK"

    @property
    def final(self) -> bool:
        return self in (State.SUCCESS, State.FAILED, State.ROLLED_BACK)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    config_id: str
    version: int
    state: State
    error: str = ""
    applied_at_ms: int = 0
    set_aside: dict[str, str] = {}
    """With SUCCESS: parts that are not in service, each with its error."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase = Phase.LIVE
    live: str = ""
    """The release that was last seen to answer; empty before the first."""
    target: str = ""
    """The release on trial."""
    error: str = ""
    """NGINX's error for the version on trial."""
    serial: int = 0
    """Counts releases, so that none is ever named like another."""
    stopped: bool = False
    """NGINX is down because somebody asked for it."""
    status: Status | None = None
    """The last status of a version, until the server has acknowledged it."""

    def begin(self, target: str) -> Journal:
        return msgspec.structs.replace(self, phase=self._next(Event.BEGUN), target=target, error="")

    def confirm(self, status: Status | None) -> Journal:
        live = self.target if self.phase is Phase.SWITCHING else self.live
        phase = self._next(Event.CONFIRMED)
        return msgspec.structs.replace(
            self, phase=phase, live=live, target="", error="", status=status or self.status
        )

    def fail(self, error: str, status: Status | None = None) -> Journal:
        phase = self._next(Event.FAILED)
        if phase is Phase.LIVE:
            return msgspec.structs.replace(
                self, phase=phase, target="", error="", status=status or self.status
            )
        return msgspec.structs.replace(self, phase=phase, error=error)

    def _next(self, event: Event) -> Phase:
        if (self.phase, event) not in TABLE:
            raise IntegrityError(f"a change that is {self.phase} cannot be {event}")
        return TABLE[self.phase, event]

    def take_serial(self) -> Journal:
        return msgspec.structs.replace(self, serial=self.serial + 1)

    def with_status(self, status: Status | None) -> Journal:
        return msgspec.structs.replace(self, status=status)

    def with_stopped(self, stopped: bool) -> Journal:
        return msgspec.structs.replace(self, stopped=stopped)


def read(path: Path) -> Journal:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Journal)
    except FileNotFoundError:
        return Journal()
    except msgspec.MsgspecError as error:
        raise IntegrityError(
            f"{path} is damaged: {error}", hint="remove the state directory and start anew"
        ) from error


def write(path: Path, journal: Journal) -> None:
    write_durably(path, msgspec.json.encode(journal), mode=0o600)
