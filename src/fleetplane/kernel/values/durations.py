"""Durations such as `504h`, `1h30m`, `300ms`: in documents as Go writes them, typed more freely. Pure."""

from __future__ import annotations

import re

from fleetplane.kernel.errors import InvalidArgument

NANOSECONDS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,  # MICRO SIGN
    "μs": 1_000,  # GREEK SMALL LETTER MU
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
MAX_NANOSECONDS = (1 << 63) - 1  # 292 years: Go counts in signed 64-bit nanoseconds
HOURS_IN = {"d": 24, "day": 24, "days": 24, "w": 168, "week": 168, "weeks": 168}

_TERM = re.compile(r"(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?(?P<unit>[^0-9.]*)")
_DAYS = re.compile(r"(?P<count>[0-9]+) ?(?P<unit>[a-z]+)")
_SECONDS = re.compile(r"[0-9]{1,20}(?:\.[0-9]{1,20})?")
_BLANK = re.compile(r"(?<=[0-9])\s+(?=[a-zµμ])")


def parse(text: str) -> float:
    """Seconds, or InvalidArgument that says how to write it."""
    return parse_nanoseconds(text) / NANOSECONDS["s"]


def parse_typed(text: str) -> float:
    """As `parse`, and as people type it: a plain number is seconds, a blank may stand before the unit."""
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    return parse(_BLANK.sub("", text))


def parse_nanoseconds(text: str) -> int:
    """As `parse`, exact. What is finer than a nanosecond is cut off."""
    sign = -1 if text.startswith("-") else 1
    rest = text[1:] if text[:1] in ("-", "+") else text
    if rest == "0":
        return 0
    if not rest:
        raise InvalidArgument(f"{text!r} is no duration; write it like '30s', '5m' or '1h30m'")
    total, at = 0, 0
    while at < len(rest):
        match = _TERM.match(rest, at)
        assert match is not None
        whole, part, unit = match["whole"], match["part"] or "", match["unit"]
        if not whole and not part:
            raise InvalidArgument(f"{text!r} is no duration; write it like '30s', '5m' or '1h30m'")
        if unit not in NANOSECONDS:
            raise InvalidArgument(_about_unit(text, rest, unit))
        if len(whole) + len(part) > 40:  # far more digits than fit 63 bits; int() must not see millions
            raise InvalidArgument(f"the duration {text[:20]!r}… is too long")
        total += int(whole or "0") * NANOSECONDS[unit]
        total += int(part or "0") * NANOSECONDS[unit] // 10 ** len(part)
        at = match.end()
    if total > MAX_NANOSECONDS:
        raise InvalidArgument(f"the duration {text!r} is longer than 292 years")
    return sign * total


def _about_unit(text: str, rest: str, unit: str) -> str:
    if not unit:
        return f"the duration {text!r} lacks a unit: one of h, m, s, ms, us, ns"
    days = _DAYS.fullmatch(rest)
    if days and days["unit"] in HOURS_IN:
        hours = int(days["count"][:18]) * HOURS_IN[days["unit"]]
        return f"{text!r} is no duration: hours are the largest unit; write '{hours}h'"
    return f"{unit!r} in {text!r} is no unit of time: use h, m, s, ms, us or ns"


def format(seconds: float) -> str:  # noqa: A001 -- the other half of `parse`
    """The way Go prints it: `1h30m0s`, `300ms`, `0s`."""
    nanoseconds = round(seconds * NANOSECONDS["s"])
    sign, rest = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    if rest == 0:
        return "0s"
    if rest < NANOSECONDS["s"]:
        unit = "ms" if rest >= NANOSECONDS["ms"] else "µs" if rest >= NANOSECONDS["us"] else "ns"
        return f"{sign}{_decimal(rest, NANOSECONDS[unit])}{unit}"
    minutes, rest = divmod(rest, NANOSECONDS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_decimal(rest, NANOSECONDS['s'])}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else f"{sign}{text}"


def _decimal(value: int, unit: int) -> str:
    whole, part = divmod(value, unit)
    digits = f"{part:0{len(str(unit)) - 1}d}".rstrip("0") if part else ""
    return f"{whole}.{digits}" if digits else str(whole)
