"""What may be asked, whichever engine answers. Pure."""

from __future__ import annotations

import re

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.telemetry.values import BUCKETS_LIMIT, MOMENT_LIMIT_NS, PAGE_LIMIT, LineQuery

_CURSOR = re.compile(r"([0-9]{1,19})\.([0-9]{1,19})")
NEWEST_MARK = (1 << 63) - 1


def moment(at_ns: int) -> int:
    """Within what the database can count; nothing lies outside."""
    return min(max(at_ns, 0), MOMENT_LIMIT_NS)


def check_buckets(from_ns: int, to_ns: int, width_ns: int) -> None:
    if width_ns < 1 or (to_ns - from_ns) / width_ns > BUCKETS_LIMIT:
        raise InvalidArgument(f"not between 1 and {BUCKETS_LIMIT} buckets")


def page_start(query: LineQuery) -> tuple[int, int]:
    """Moment and mark of the line before which the page begins."""
    if not 1 <= query.limit <= PAGE_LIMIT:
        raise InvalidArgument(f"must be between 1 and {PAGE_LIMIT}", field="limit")
    if not query.cursor:
        return moment(query.to_ns), NEWEST_MARK
    found = _CURSOR.fullmatch(query.cursor)
    if found is None or int(found[1]) > MOMENT_LIMIT_NS or int(found[2]) > NEWEST_MARK:
        raise InvalidArgument("is not a cursor of this list", field="cursor")
    return int(found[1]), int(found[2])
