"""Results on their way to the server, and whatever session there is to carry news.

A result counts as told once the stream it went out on has outlived it by a while; if the stream
breaks before that, it goes out again on the next. A server knows a result that it has seen.
"""

from __future__ import annotations

from typing import Final, Protocol

from fleetplane.domains.edge.agent.commands.journal import CommandJournal
from fleetplane.kernel.clock import Clock
from fleetplane.node.outbox import Outbox

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
