"""When boards and services last reported, and over which connection a board did.

Reports are not stored. A board without a certificate says who it is only when it registers, and then
continues on the same connection; that connection is remembered here.

The health of services that are not boards is reported by controllers. On a database file it is kept in
memory: a live service soon reports again. Several servers receive each a part of the reports; there a report
is stored if it differs or the stored one is a minute old, so that all servers show the same.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import SCOPE, Board, BoardsSpec, number_of
from fleetplane.kernel.resources import Condition, Key, Kind, Nothing
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS

SERVICES_LIMIT: Final = 256
"""The service with the oldest report is forgotten first."""
AGAIN_NS: Final = 60 * NS
"""A report that says nothing new is written down this long after the one before."""


class ServiceReport(BoardsSpec, frozen=True):
    reporter: str
    """The principal in the certificate."""
    service: str
    conditions: tuple[Condition, ...]
    at_ns: int


BOARD_SERVICE: Kind[ServiceReport, Nothing] = Kind("board-service", ServiceReport, Nothing)


class ServiceReports:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._reports: OrderedDict[tuple[str, str], ServiceReport] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ServiceReports {len(self.all())}>"

    async def heard(self, report: ServiceReport) -> None:
        if self._store.shared:
            await self._write(report)
            return
        key = (report.reporter, report.service)
        self._reports[key] = report
        self._reports.move_to_end(key)
        while len(self._reports) > SERVICES_LIMIT:
            self._reports.popitem(last=False)

    async def _write(self, report: ServiceReport) -> None:
        name = _name(report)
        before = self._store.get(BOARD_SERVICE, SCOPE, name)
        if before is not None and not _is_news(report, before.spec):
            return
        kept = sorted(self._store.list(BOARD_SERVICE, SCOPE), key=lambda one: one.spec.at_ns)
        oldest = [one.name for one in kept[: max(0, len(kept) + 1 - SERVICES_LIMIT)] if one.name != name]

        def change(draft: Draft) -> None:
            known = draft.get(BOARD_SERVICE, SCOPE, name)
            if known is not None and known.spec.at_ns >= report.at_ns:
                return  # another server heard it later
            draft.put(BOARD_SERVICE, SCOPE, name, spec=report)
            for one in oldest if known is None else ():
                if draft.get(BOARD_SERVICE, SCOPE, one) is not None:
                    draft.delete(BOARD_SERVICE, SCOPE, one)

        await self._store.transact(
            change,
            actor=report.reporter,
            action="boards.service_report",
            touches=[_key(name), *map(_key, oldest)],
        )

    def all(self) -> Sequence[ServiceReport]:
        found = list(self._reports.values())
        if self._store.shared:
            found = [one.spec for one in self._store.list(BOARD_SERVICE, SCOPE)]
        return sorted(found, key=lambda one: (one.reporter, one.service))


def _is_news(report: ServiceReport, before: ServiceReport) -> bool:
    """Messages have figures in them that change with every report, and are no news."""
    said, known = ({one.type: one.status for one in each.conditions} for each in (report, before))
    return said != known or report.at_ns - before.at_ns >= AGAIN_NS


def _name(report: ServiceReport) -> str:
    return hashlib.sha256(f"{report.reporter}\n{report.service}".encode()).hexdigest()[:32]


def _key(name: str) -> Key:
    return BOARD_SERVICE.key(SCOPE, name)


CONNECTIONS_REMEMBERED = 16_384
"""As many as one listener holds; a hundred bytes each. The one unused for longest is forgotten."""


@dataclass(slots=True, kw_only=True)
class BoardSighting:
    seen_at_ns: int
    boot_id: str = ""
    sequence: int = 0


class BoardPresence:
    def __init__(self) -> None:
        self._sightings: dict[int, BoardSighting] = {}
        self._connections: OrderedDict[tuple[str, str], int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Presence boards={len(self._sightings)} connections={len(self._connections)}>"

    # Sightings.

    def seen(self, board: int, *, now_ns: int) -> BoardSighting:
        sighting = self._sightings.get(board)
        if sighting is None:
            sighting = self._sightings[board] = BoardSighting(seen_at_ns=now_ns)
        sighting.seen_at_ns = now_ns
        return sighting

    def learn(self, heard: Mapping[int, int]) -> None:
        """When boards were heard by other servers."""
        for board, at_ns in heard.items():
            if (sighting := self._sightings.get(board)) is None:
                self._sightings[board] = BoardSighting(seen_at_ns=at_ns)
            else:
                sighting.seen_at_ns = max(sighting.seen_at_ns, at_ns)

    def is_heard_since(self, board: Board, at_ns: int) -> bool:
        """Whether any server has told this process of a sign of life since then."""
        sighting = self._sightings.get(number_of(board))
        return sighting is not None and sighting.seen_at_ns >= at_ns

    def last_seen_ns(self, board: Board) -> int | None:
        """From memory, or as of the last write."""
        sighting = self._sightings.get(number_of(board))
        return sighting.seen_at_ns if sighting is not None else status_of(board).last_seen_at_ns

    def is_newer(self, board: Board, *, boot_id: str, sequence: int) -> bool:
        """Whether a report is later than all before it; counting starts anew with each boot.

        A report without a number is always taken: nothing is known about its order.
        """
        if not sequence:
            return True
        sighting = self._sightings.get(number_of(board))
        kept = status_of(board)
        known_boot, last = (
            (sighting.boot_id or kept.boot_id, sighting.sequence)
            if sighting is not None
            else (kept.boot_id, kept.sequence)
        )
        return bool(boot_id and boot_id != known_boot) or sequence > last

    @contextmanager
    def counting(self, board: int, *, boot_id: str, sequence: int, now_ns: int) -> Iterator[None]:
        """Count a report while it is taken in: an older one that comes meanwhile is not taken any more.

        One that could not be taken in was not counted: it may be sent again.
        """
        sighting = self.seen(board, now_ns=now_ns)
        before = sighting.boot_id, sighting.sequence
        counted = boot_id or sighting.boot_id, sequence or sighting.sequence
        sighting.boot_id, sighting.sequence = counted
        try:
            yield
        except BaseException:
            if (sighting.boot_id, sighting.sequence) == counted:
                sighting.boot_id, sighting.sequence = before
            raise

    def restarted(self, board: int, *, boot_id: str, now_ns: int) -> None:
        """A board that registers counts from the beginning."""
        self._sightings[board] = BoardSighting(seen_at_ns=now_ns, boot_id=boot_id)

    def forget(self, board: int) -> None:
        self._sightings.pop(board, None)
        for at in [at for at, number in self._connections.items() if number == board]:
            del self._connections[at]

    # Connections.

    def bind(self, listener: str, peer: str, board: int) -> None:
        at = (listener, peer)
        self._connections[at] = board
        self._connections.move_to_end(at)
        if len(self._connections) > CONNECTIONS_REMEMBERED:
            self._connections.popitem(last=False)

    def behind(self, listener: str, peer: str) -> int | None:
        """The board that registered over this connection."""
        at = (listener, peer)
        found = self._connections.get(at)
        if found is not None:
            self._connections.move_to_end(at)
        return found
