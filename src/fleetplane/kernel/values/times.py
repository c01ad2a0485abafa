"""Moments are nanoseconds since the epoch; here is what they are made of and how they are spelled. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

NS = 1_000_000_000
"""Nanoseconds in a second."""
MINUTE_NS = 60 * NS
HOUR_NS = 3600 * NS
DAY_NS = 86_400 * NS


def spelled(at_ns: int) -> str:
    """RFC 3339, UTC, to the second."""
    return datetime.fromtimestamp(at_ns // NS, UTC).isoformat()[:19] + "Z"


def spelled_or_null(at_ns: int | None) -> str | None:
    """As `spelled`, and null for what never was."""
    return None if at_ns is None else spelled(at_ns)
