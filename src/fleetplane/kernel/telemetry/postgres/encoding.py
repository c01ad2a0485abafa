"""Rows as PostgreSQL's COPY takes them in its binary form. Pure, and called by a thread of its own."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_HEADER: Final = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
_END: Final = struct.pack(">h", -1)
_POINT: Final = struct.Struct(">hiqiqidid").pack
_LINE: Final = struct.Struct(">hiqiqiqiqi").pack
_LENGTH: Final = struct.Struct(">i").pack
CHUNK_BYTES: Final = 256 * 1024
"""Handed to the connection at once, between which others run."""

PointRow = tuple[int, int, float, float]


class LineRow(NamedTuple):
    channel: int
    at_ns: int
    mark: int
    code: int
    source: str
    subject: str
    action: str
    body: bytes


def text(given: str) -> str:
    """As PostgreSQL can hold it: it knows no character zero."""
    return given.replace("\0", "\ufffd") if "\0" in given else given


def points(rows: Iterable[PointRow]) -> list[bytes]:
    pack = _POINT
    return _chunks([pack(4, 8, row[0], 8, row[1], 8, row[2], 8, row[3]) for row in rows])


def lines(rows: Iterable[LineRow]) -> list[bytes]:
    made: list[bytes] = []
    pack, length = _LINE, _LENGTH
    sources: dict[str, bytes] = {}
    for channel, at_ns, mark, code, source, subject, action, body in rows:
        if (sender := sources.get(source)) is None:
            sender = sources[source] = source.encode()
        about, done = subject.encode(), action.encode()
        made.append(pack(8, 8, channel, 8, at_ns, 8, mark, 8, code, len(sender)))
        made += (sender, length(len(about)), about, length(len(done)), done, length(len(body)), body)
    return _chunks(made)


def _chunks(parts: Sequence[bytes]) -> list[bytes]:
    whole = b"".join((_HEADER, *parts, _END))
    return [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
