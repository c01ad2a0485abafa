"""The commands this daemon took: none is run twice, and no result is lost.

A command's id is on disk before the command begins, its result before it is sent. A repeated id is answered
with the result; if there is none, the daemon died while the command ran, and only that can be said.
The file is append-only lines, read once and written anew at the start; an incomplete last line is ignored.

A result counts as told once the stream it went out on has outlived it by a while; if the stream
breaks before that, it goes out again on the next. The server recognizes a result that it has seen.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final, Protocol

import msgspec

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.files import write_durably
from fleetplane.node.outbox import Outbox

REMEMBERED: Final = 4096
"""Ids. A server asks again for what it has no answer to, which is never thousands of commands old."""
RESULTS_LIMIT_BYTES: Final = 16 * 1024 * 1024
RESULT_LIMIT_BYTES: Final = 1024 * 1024
"""Of one result: both outputs' ends, and what a tool says besides."""
FILE_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""Then it is written anew, with what is still remembered."""
KEEP_SECONDS: Final = 7 * 24 * 3600.0


class JournalRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    at: float
    """Seconds since the Unix epoch."""
    result: bytes | None = None
    """None: it was begun."""
    delivered: bool = False


class CommandJournal:
    """`open`, `begun` and `ended` block on the disk, and have one user at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: OrderedDict[str, JournalRecord] = OrderedDict()
        self._descriptor = -1
        self._held_bytes = 0
        self._file_bytes = 0
        self._memory = threading.Lock()
        """Records and their bytes: the loop notes what was delivered while a thread appends. Not the file."""

    def __repr__(self) -> str:
        return f"<Journal {len(self._records)} commands, {self._held_bytes} bytes of results>"

    def open(self, *, now: float) -> None:
        self._read(now)
        self._rewrite()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def find(self, command_id: str) -> JournalRecord | None:
        return self._records.get(command_id)

    @property
    def last(self) -> str:
        """The command begun last."""
        return next(reversed(self._records), "")

    def undelivered(self) -> list[JournalRecord]:
        return [
            record for record in self._records.values() if record.result is not None and not record.delivered
        ]

    def begun(self, command_id: str, *, now: float) -> None:
        self._append(JournalRecord(id=command_id, at=now))

    def ended(self, command_id: str, result: bytes, *, now: float) -> None:
        self._append(JournalRecord(id=command_id, at=now, result=result))

    def delivered(self, command_id: str) -> None:
        """The server has it. Not worth waiting for the disk: sending it once more does no harm."""
        with self._memory:
            record = self._records.get(command_id)
            if record is not None and not record.delivered:
                self._remember(msgspec.structs.replace(record, delivered=True))

    def _append(self, record: JournalRecord) -> None:
        line = msgspec.json.encode(record) + b"\n"
        if self._file_bytes + len(line) > FILE_LIMIT_BYTES:
            self._rewrite()
        try:
            _write_all(self._descriptor, line)
            os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._file_bytes)  # half a line would spoil the next one
            raise
        self._file_bytes += len(line)
        with self._memory:
            self._remember(record)

    def _remember(self, record: JournalRecord) -> None:
        before = self._records.get(record.id)
        self._held_bytes += len(record.result or b"") - len((before.result if before else None) or b"")
        self._records[record.id] = record
        while len(self._records) > REMEMBERED:
            _, gone = self._records.popitem(last=False)
            self._held_bytes -= len(gone.result or b"")
        if self._held_bytes > RESULTS_LIMIT_BYTES:
            self._forget_results()

    def _forget_results(self) -> None:
        """Delivered ones first, then the oldest; that they were answered stays known."""
        for record in sorted(self._records.values(), key=lambda record: (not record.delivered, record.at)):
            if self._held_bytes <= RESULTS_LIMIT_BYTES:
                return
            if record.result:
                self._held_bytes -= len(record.result)
                self._records[record.id] = msgspec.structs.replace(record, result=b"", delivered=True)

    def _read(self, now: float) -> None:
        try:
            lines = self._path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        for line in lines:
            try:
                record = msgspec.json.decode(line, type=JournalRecord)
            except msgspec.DecodeError:
                continue
            if now - record.at < KEEP_SECONDS:
                self._remember(record)

    def _rewrite(self) -> None:
        self.close()
        content = b"".join(msgspec.json.encode(record) + b"\n" for record in self._records.values())
        write_durably(self._path, content, mode=0o600)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._file_bytes = len(content)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


SETTLED_SECONDS: Final = 30.0
"""A stream that stands this long after a result has delivered it: keepalive would have ended a dead one."""
WAITING_LIMIT: Final = 4096
"""Results. The oldest is dropped first; a repeated command gets it from the journal."""


class Carrier(Protocol):
    async def send_progress(self, command_id: str, chunk: bytes) -> None: ...


class ResultOutbox(Outbox[str, bytes]):
    def __init__(
        self, journal: CommandJournal, clock: Clock, *, settled_seconds: float = SETTLED_SECONDS
    ) -> None:
        super().__init__(limit=WAITING_LIMIT)
        self._journal = journal
        self._clock = clock
        self._settled_seconds = settled_seconds
        self._carrier: Carrier | None = None
        self.dropped_chunks = 0

    def __repr__(self) -> str:
        return f"<ResultOutbox {len(self)} waiting, dropped {self.dropped} and {self.dropped_chunks} chunks>"

    def load(self) -> None:
        """What an earlier process could not tell."""
        for record in self._journal.undelivered():
            self.result(record.id, record.result or b"")

    # From commands.

    def result(self, command_id: str, result: bytes) -> None:
        """It is in the journal already."""
        self.put(command_id, result)

    async def progress(self, command_id: str, chunk: bytes) -> None:
        """Tell it now or never."""
        if self._carrier is None:
            self.dropped_chunks += 1
        else:
            await self._carrier.send_progress(command_id, chunk)

    # From a session.

    def attach(self, carrier: Carrier) -> None:
        """Everything goes out once on a new stream."""
        self._carrier = carrier
        self.new_stream()

    def detach(self, carrier: Carrier) -> None:
        if self._carrier is carrier:
            self._carrier = None

    def went_out(self, command_id: str, result: bytes) -> None:
        self.sent(command_id, result, at=self._clock.monotonic())

    def settle(self) -> None:
        """The stream stands: forget what went out long enough ago."""
        for command_id in self.sent_before(self._clock.monotonic() - self._settled_seconds):
            self.confirmed(command_id)
            self._journal.delivered(command_id)
