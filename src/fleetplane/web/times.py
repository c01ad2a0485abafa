"""Moments as REST spells them: RFC 3339, UTC, to the second."""

from __future__ import annotations

from datetime import UTC, datetime

from fleetplane.web.problems import Problem, Rejected

NS_PER_SECOND = 1_000_000_000


def spelled(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns // NS_PER_SECOND, UTC).isoformat()[:19] + "Z"


def spelled_or_null(at_ns: int | None) -> str | None:
    return None if at_ns is None else spelled(at_ns)


def parsed(text: str, *, field: str) -> int:
    """Nanoseconds since the epoch; a time without a zone could be anyone's, and is refused."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None or "T" not in text.upper():
            raise ValueError(text)
        seconds = int(moment.replace(microsecond=0).timestamp())
        if seconds < 0:
            raise ValueError(text)
        return seconds * NS_PER_SECOND + moment.microsecond * 1000
    except (ValueError, OverflowError, OSError) as error:
        raise Rejected(Problem(field=field, message="Must be a time such as 2026-03-01T00:00:00Z")) from error
