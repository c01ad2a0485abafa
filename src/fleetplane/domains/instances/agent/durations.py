"""Durations as the protocol writes them: `1h0m30s`, `500ms`, `0`. Pure."""

from __future__ import annotations

import re

from fleetplane.kernel.errors import InvalidArgument

UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def parse_duration(text: str) -> float:
    """As seconds. `0` needs no unit; everything else does."""
    rest = text.strip()
    if rest == "0":
        return 0.0
    seconds = 0.0
    while rest and (part := _PART.match(rest)):
        seconds += float(part[1]) * UNIT_SECONDS[part[2]]
        rest = rest[part.end() :]
    if rest or not text.strip():
        raise InvalidArgument(f"{text!r} is no duration", hint="write 60s, 1m30s, 500ms or 0")
    return seconds


def format_duration(seconds: float) -> str:
    """Whole seconds, in the protocol's words: `0s`, `59s`, `1m0s`, `26h3m4s`."""
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
