"""Moments as callers of REST spell them; how we do is in `kernel/values/times.py`."""

from __future__ import annotations

from datetime import datetime

from fleetplane.kernel.values.times import NS
from fleetplane.web.rest.problems import Problem, Rejected


def parsed(text: str, *, field: str) -> int:
    """Nanoseconds since the epoch; a time without a zone could be anyone's, and is refused."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None or "T" not in text.upper():
            raise ValueError(text)
        seconds = int(moment.replace(microsecond=0).timestamp())
        if seconds < 0:
            raise ValueError(text)
        return seconds * NS + moment.microsecond * 1000
    except (ValueError, OverflowError, OSError) as error:
        raise Rejected(Problem(field=field, message="Must be a time such as 2026-03-01T00:00:00Z")) from error
