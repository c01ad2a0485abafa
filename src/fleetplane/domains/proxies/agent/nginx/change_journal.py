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

from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.files import write_durably


class ChangePhase(StrEnum):
    LIVE = "live"
    SWITCHING = "switching"
    REVERTING = "reverting"


class JournalEvent(StrEnum):
    BEGUN = "begun"
    CONFIRMED = "confirmed"
    FAILED = "failed"


TABLE: Final = {
    (ChangePhase.LIVE, JournalEvent.BEGUN): ChangePhase.SWITCHING,
    (ChangePhase.SWITCHING, JournalEvent.CONFIRMED): ChangePhase.LIVE,
    (ChangePhase.SWITCHING, JournalEvent.FAILED): ChangePhase.REVERTING,
    (ChangePhase.REVERTING, JournalEvent.CONFIRMED): ChangePhase.LIVE,
    # The old release does not come up either: it is still the one to trust, and we say so loudly.
    (ChangePhase.REVERTING, JournalEvent.FAILED): ChangePhase.LIVE,
}


class VersionState(StrEnum):
    """How far we are with a version, as the wire names it."""

    PENDING = "PENDING"
    VALIDATING = "VALIDATING"
    APPLYING = "APPLYING"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    ROLLED_BACK = "ROLLED_BACK"

    @property
    def final(self) -> bool:
        return self in (VersionState.SUCCESS, VersionState.FAILED, VersionState.ROLLED_BACK)


class VersionStatus(msgspec.Struct, frozen=True, kw_only=True):
    config_id: str
    version: int
    state: VersionState
    error: str = ""
    applied_at_ms: int = 0
    set_aside: dict[str, str] = {}
    """With SUCCESS: parts that are not in service, each with its error."""


class ChangeJournal(msgspec.Struct, frozen=True, kw_only=True):
    phase: ChangePhase = ChangePhase.LIVE
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
    status: VersionStatus | None = None
    """The last status of a version, until the server has acknowledged it."""

    def begin(self, target: str) -> ChangeJournal:
        return msgspec.structs.replace(self, phase=self._next(JournalEvent.BEGUN), target=target, error="")

    def confirm(self, status: VersionStatus | None) -> ChangeJournal:
        live = self.target if self.phase is ChangePhase.SWITCHING else self.live
        phase = self._next(JournalEvent.CONFIRMED)
        return msgspec.structs.replace(
            self, phase=phase, live=live, target="", error="", status=status or self.status
        )

    def fail(self, error: str, status: VersionStatus | None = None) -> ChangeJournal:
        phase = self._next(JournalEvent.FAILED)
        if phase is ChangePhase.LIVE:
            return msgspec.structs.replace(
                self, phase=phase, target="", error="", status=status or self.status
            )
        return msgspec.structs.replace(self, phase=phase, error=error)

    def _next(self, event: JournalEvent) -> ChangePhase:
        if (self.phase, event) not in TABLE:
            raise IntegrityError(f"a change that is {self.phase} cannot be {event}")
        return TABLE[self.phase, event]

    def take_serial(self) -> ChangeJournal:
        return msgspec.structs.replace(self, serial=self.serial + 1)

    def with_status(self, status: VersionStatus | None) -> ChangeJournal:
        return msgspec.structs.replace(self, status=status)

    def with_stopped(self, stopped: bool) -> ChangeJournal:
        return msgspec.structs.replace(self, stopped=stopped)


def read(path: Path) -> ChangeJournal:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ChangeJournal)
    except FileNotFoundError:
        return ChangeJournal()
    except msgspec.MsgspecError as error:
        raise IntegrityError(
            f"{path} is damaged: {error}", hint="remove the state directory and start anew"
        ) from error


def write(path: Path, journal: ChangeJournal) -> None:
    write_durably(path, msgspec.json.encode(journal), mode=0o600)
