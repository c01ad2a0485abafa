"""When boards were last heard from, and over which connection: in memory, because reports are not stored.

A board without a certificate says who it is only when it registers, and then goes on without a
word about it on the same connection. Which connection that was is remembered here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.kinds import Board, number_of

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
