"""Amounts of targets, written as a number (`5`) or as a percentage (`10%`). Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from fleetplane.kernel.errors import InvalidArgument

NUMBER_LIMIT = 1_000_000
_AMOUNT = re.compile(r"(?P<whole>[0-9]{1,7})(?:\.(?P<part>[0-9]{1,3}))?(?P<percent>%)?")
_HUNDRED = 100_000
"""Percentages are counted in thousandths of a percent, so that comparisons are exact."""


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[int, bool]:
    """The number, or thousandths of a percent; and whether it is a percentage."""
    found = _AMOUNT.fullmatch(text)
    if found is None or (found["part"] and not found["percent"]):
        raise InvalidArgument(f"{text[:40]!r} is not an amount; write a number such as 5, or 10%")
    if not found["percent"]:
        if int(found["whole"]) > NUMBER_LIMIT:
            raise InvalidArgument(f"{text} is more than {NUMBER_LIMIT}")
        return int(found["whole"]), False
    thousandths = int(found["whole"]) * 1000 + int((found["part"] or "").ljust(3, "0"))
    if thousandths > _HUNDRED:
        raise InvalidArgument(f"{text} is more than 100%")
    return thousandths, True


def check(text: str, *, field: str, at_least_one: bool = False) -> None:
    """Refuse what is not an amount, naming the field."""
    try:
        value, _ = _parsed(text)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=field) from None
    if at_least_one and value == 0:
        raise InvalidArgument(f"must be more than 0, not {text}", field=field)


def room(text: str, of: int) -> int:
    """How many of `of` an amount allows: percentages are rounded up, and it is one at least."""
    value, percent = _parsed(text)
    return max(1, -(-value * of // _HUNDRED)) if percent else max(1, value)


def at_most(text: str, of: int) -> int:
    """The largest count of `of` that does not exceed an amount: percentages are rounded down."""
    value, percent = _parsed(text)
    return value * of // _HUNDRED if percent else value


def exceeds(count: int, text: str, of: int) -> bool:
    """Whether a count is more than an amount of `of`; 1 of 10 does not exceed 10%."""
    value, percent = _parsed(text)
    return count * _HUNDRED > value * of if percent else count > value
