"""The node's own audit log: one line of JSON for every act, in a file that only its owner reads.

Bounded: a file that is full becomes the one before it, and the one before that goes. Written at once
and not waited for on the disk, because a card has a life of writes; what was audited before a crash of
the agent is there, what before a power cut may lack its last second.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

import msgspec
import structlog

from fleetplane.domains.boards.agent.buses.buses import BusEntry
from fleetplane.domains.boards.agent.pins.lines import AuditEntry
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Unavailable

FILE_LIMIT_BYTES: Final = 4 * 1024 * 1024
"""Two of them: about 40,000 acts."""
LINE_LIMIT_BYTES: Final = 16 * 1024
MODE: Final = 0o600

Value = str | int | float | bool | list[str] | Mapping[str, str]
Facts = Mapping[str, Value]


class BoardAuditLog:
    def __init__(
        self,
        path: Path,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        *,
        limit_bytes: int = FILE_LIMIT_BYTES,
    ) -> None:
        self._path = path
        self._clock = clock
        self._log = log
        self._limit_bytes = limit_bytes
        self._descriptor = -1
        self._size = 0
        self.lost = 0
        """Entries that could not be written."""

    def __repr__(self) -> str:
        return f"<AuditTrail {self._path} {self._size} bytes, {self.lost} lost>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def pin(self, entry: AuditEntry) -> None:
        facts: dict[str, Value] = {
            "user": entry.user,
            "pin": entry.pin,
            "message": entry.message,
            "details": entry.details,
        }
        self.note(entry.event, facts, at_ns=entry.at_ns)

    def bus(self, entry: BusEntry) -> None:
        facts: dict[str, Value] = {
            "user": entry.user,
            "where": entry.where,
            "bytes": entry.size_bytes,
            "message": entry.message,
        }
        self.note(entry.event, facts, at_ns=entry.at_ns)

    def note(self, event: str, facts: Facts, *, at_ns: int | None = None) -> None:
        """Never raises: what cannot be written is counted, and told in the log once."""
        try:
            self._append(self._line(event, at_ns, facts))
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                self._log.error("audit.not_written", path=str(self._path), error=str(error))

    def require(self, event: str, facts: Facts) -> None:
        """For acts that must not happen without a trace."""
        try:
            self._append(self._line(event, None, facts))
        except OSError as error:
            self.lost += 1
            raise Unavailable(
                f"the audit log cannot be written: {error.strerror}", details={"cause": "audit"}
            ) from error

    def _line(self, event: str, at_ns: int | None, facts: Facts) -> bytes:
        at = datetime.fromtimestamp((at_ns or self._clock.now_ns()) / 1e9, UTC).isoformat()
        line = msgspec.json.encode({"at": at, "event": event, **_without_blanks(facts)})
        if len(line) > LINE_LIMIT_BYTES:
            kept = {name: value for name, value in facts.items() if isinstance(value, int | float)}
            short = {"at": at, "event": event, "user": str(facts.get("user", ""))[:256], **kept}
            line = msgspec.json.encode({**short, "shortened": True})
        return line + b"\n"

    def _append(self, line: bytes) -> None:
        if self._descriptor < 0:
            self._open()
        if self._size and self._size + len(line) > self._limit_bytes:
            self.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._open()
        written = os.write(self._descriptor, line)
        self._size += written
        if written < len(line):  # half a line, on a disk that is full: the next one stands by itself
            os.ftruncate(self._descriptor, self._size - written)
            self._size -= written
            raise OSError(28, "No space left on device")

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, MODE)
        os.fchmod(self._descriptor, MODE)
        self._size = os.fstat(self._descriptor).st_size


def _without_blanks(facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if value not in ("", [], {})}
