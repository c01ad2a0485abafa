"""Decides whether NGINX has taken a new configuration, and keeps the journal of a change.

Exit codes say nothing: a reload that cannot bind its port sends the signal, ends with 0, and the
old workers serve on. One answer from the new release says too little: for about 100 ms after
it the old workers still take connections. And when going back, the old workers never stopped
answering with the old release. So a release is confirmed when, for a while without interruption,

- every answer names it, and
- there are workers, all of them started after the signal (those that are shutting down aside), and
- NGINX's master has logged nothing fatal since.

The journal holds which release is trusted and which one is on trial:

    phase       what is on disk                        what comes next
    LIVE        `live` was seen to answer              nothing is owed
    SWITCHING   `target` may or may not be linked      link it, reload, confirm; else REVERTING
    REVERTING   `target` has failed                    link `live`, reload, confirm; then LIVE

It is written before anything it announces is done. An agent that died finds in it the step that was about to
be taken, and takes it again: every step may be taken twice. A release becomes `live` only once it was
confirmed, so there is always one to go back to. Pure, but for the functions that read and write the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
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


STEADY_SECONDS: Final = 0.5
LIMIT_SECONDS: Final = 10.0
"""Four times what NGINX itself takes to give up on a port."""
LOOK_SECONDS: Final = 2.0
"""What counts of the time between two looks, each of which waits a second at most: a machine that stood still
has not watched NGINX fail."""
WORDS_LIMIT: Final = 4000

_LINE: Final = re.compile(r"^\S+ \S+ \[(?P<level>\w+)\] (?P<pid>\d+)#\d+: (?P<words>.*)$")
_FATAL: Final = frozenset({"emerg", "alert", "crit"})
_RETRIED: Final = re.compile(r"bind\(\) to .* failed|listen\(\) to .* failed")
"""NGINX tries again for 2.5 s, and then says that it still could not."""
_ABOUT_WORKERS: Final = re.compile(r"worker process \d+ exited|cache \w+ process \d+ exited")
"""The end of an old worker says nothing about the new release."""


@dataclass(frozen=True, slots=True)
class NginxWorker:
    pid: int
    started: int
    """In ticks since the machine started: a number used again is not the same worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLook:
    """One observation."""

    now: float
    answer: str | None
    """The release that answered; None if there was no answer."""
    workers: frozenset[NginxWorker]
    """Those that are not shutting down."""
    running: bool
    log: Iterable[str] = ()
    """New lines of NGINX's log."""


@dataclass(frozen=True, slots=True)
class Confirmed:
    pass


@dataclass(frozen=True, slots=True)
class RefusedVersion:
    words: str


Verdict = Confirmed | RefusedVersion | None


@dataclass(slots=True, kw_only=True)
class VersionTrial:
    """Collects looks until they decide."""

    release: str
    before: frozenset[NginxWorker]
    """The workers that were there before the signal."""
    master: int
    started: float
    steady_seconds: float = STEADY_SECONDS
    limit_seconds: float = LIMIT_SECONDS
    words: list[str] = field(default_factory=list)
    _watched_seconds: float = 0.0
    _looked_at: float | None = None
    _steady_since: float | None = None
    _steady_workers: frozenset[NginxWorker] = frozenset()

    def observe(self, look: WorkerLook) -> Verdict:
        last = self.started if self._looked_at is None else self._looked_at
        self._watched_seconds += min(look.now - last, LOOK_SECONDS)
        self._looked_at = look.now
        if (refusal := self._read(look.log)) is not None:
            return refusal
        if not look.running:
            return self._refuse("NGINX is gone")
        if look.answer != self.release or not look.workers or look.workers & self.before:
            self._steady_since = None
        elif self._steady_since is None or look.workers != self._steady_workers:
            self._steady_since, self._steady_workers = look.now, look.workers
        elif look.now - self._steady_since >= self.steady_seconds:
            return Confirmed()
        if self._watched_seconds > self.limit_seconds:
            return self._refuse(f"release {self.release} was not confirmed in {self.limit_seconds:g} s")
        return None

    def _read(self, lines: Iterable[str]) -> RefusedVersion | None:
        for line in lines:
            found = _LINE.match(line)
            if found is None or found["level"] not in _FATAL or int(found["pid"]) != self.master:
                continue
            if _ABOUT_WORKERS.search(line):
                continue
            words = f"[{found['level']}] {found['words']}"
            if words not in self.words:
                self.words.append(words)
            if not _RETRIED.search(line):
                return self._refuse()
        return None

    def _refuse(self, *more: str) -> RefusedVersion:
        return RefusedVersion("; ".join([*self.words, *more])[:WORDS_LIMIT])
