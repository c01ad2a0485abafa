"""Rows that wait to be written, so that nobody who sends much keeps others from being heard.

While the queue is less than half full, everybody puts in what they have. Beyond that, each tenant may
have an equal share of the whole, and within it each source, with one share left for whoever comes next:
whoever has more is refused, the others go on. Rows are taken out in turn, a few of each source, so that
whoever sent little does not wait behind whoever sent much.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Final

from fleetplane.kernel.telemetry.values import LogRecord, Point

QUANTUM: Final = 32
"""Rows of one source that are taken before it is the next one's turn."""
OPEN_SHARE: Final = 0.5
"""Of the queue that anybody may fill alone."""
FLOOR_ROWS: Final = 512
"""Rows that a source may always have waiting while there is room at all: a few reports of a board."""
FLOOR_BYTES: Final = 256 * 1024

Row = Point | LogRecord
_SENDER: Final = attrgetter("scope", "source")


@lru_cache(maxsize=4_096)
def tenant_of(scope: str) -> str:
    """Whose rows these are, for sharing: the first two parts of a scope, such as `org/7`."""
    return "/".join(scope.split("/", 2)[:2])


@dataclass(slots=True)
class _Waiting:
    rows: deque[Row] = field(default_factory=deque)
    bytes: int = 0


@dataclass(slots=True)
class _Tenant:
    sources: OrderedDict[str, _Waiting] = field(default_factory=OrderedDict)
    rows: int = 0
    bytes: int = 0


class FairLineQueue:
    def __init__(self, *, rows_limit: int, bytes_limit: int) -> None:
        self._rows_limit = rows_limit
        self._bytes_limit = bytes_limit
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._rows = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._rows

    def __repr__(self) -> str:
        return f"<FairQueue rows={self._rows} tenants={len(self._tenants)}>"

    def put(self, rows: Sequence[Row]) -> bool:
        """Take all of these, or none where some sender among them has more than its share."""
        added: dict[tuple[str, str], list[Row]] = {}
        for (scope, source), some in groupby(rows, _SENDER):  # nearly always one sender
            added.setdefault((tenant_of(scope), source), []).extend(some)
        sizes = {sender: _size(part) for sender, part in added.items()}
        if not all(self._fits(*sender, len(part), sizes[sender]) for sender, part in added.items()):
            return False
        if self._rows + len(rows) > self._rows_limit or self._bytes + sum(sizes.values()) > self._bytes_limit:
            return False
        for sender, part in added.items():
            self._add(*sender, part, sizes[sender])
        return True

    def has_room(self, scope: str, source: str, *, count: int, size: int) -> bool:
        """Whether as much of a source would be taken, so that nothing is decoded in vain."""
        if self._rows + count > self._rows_limit or self._bytes + size > self._bytes_limit:
            return False
        return self._fits(tenant_of(scope), source, count, size)

    def take(self, count: int) -> list[Row]:
        """Up to `count` rows, those of every source in order, sources and tenants in turn."""
        taken: list[Row] = []
        while self._tenants and len(taken) < count:
            name, tenant = next(iter(self._tenants.items()))
            source, waiting = next(iter(tenant.sources.items()))
            part = [
                waiting.rows.popleft() for _ in range(min(QUANTUM, len(waiting.rows), count - len(taken)))
            ]
            size = _size(part)
            for counted in (waiting, tenant):
                counted.bytes -= size
            tenant.rows -= len(part)
            self._rows -= len(part)
            self._bytes -= size
            taken += part
            tenant.sources.move_to_end(source)
            self._tenants.move_to_end(name)
            if not waiting.rows:
                del tenant.sources[source]
            if not tenant.sources:
                del self._tenants[name]
        return taken

    def _fits(self, tenant: str, source: str, count: int, size: int) -> bool:
        is_open = (
            self._rows + count <= self._rows_limit * OPEN_SHARE
            and self._bytes + size <= self._bytes_limit * OPEN_SHARE
        )
        if is_open:
            return True
        known = self._tenants.get(tenant, _Tenant())
        waiting = known.sources.get(source, _Waiting())
        tenants = len(self._tenants) + (tenant not in self._tenants)
        sources = len(known.sources) + (source not in known.sources)
        if len(waiting.rows) + count <= FLOOR_ROWS and waiting.bytes + size <= FLOOR_BYTES:
            return True
        for limit, of_tenant, of_source, more in (
            (self._rows_limit, known.rows, len(waiting.rows), count),
            (self._bytes_limit, known.bytes, waiting.bytes, size),
        ):
            # One share is kept free for a tenant, and one for a source, that has nothing waiting yet.
            share = limit // (tenants + 1)
            if more and (of_tenant + more > share or of_source + more > share // (sources + 1)):
                return False
        return True

    def _add(self, tenant: str, source: str, part: Sequence[Row], size: int) -> None:
        known = self._tenants.setdefault(tenant, _Tenant())
        waiting = known.sources.setdefault(source, _Waiting())
        waiting.rows.extend(part)
        waiting.bytes += size
        known.bytes += size
        known.rows += len(part)
        self._rows += len(part)
        self._bytes += size


def _size(rows: Sequence[Row]) -> int:
    """Bytes of lines; points are small."""
    return sum([len(row.body) for row in rows if isinstance(row, LogRecord)])
