"""A rollout's policy: waves, budgets, gates and windows, with their bounds. Pure.

A window has five fields as in cron, a time zone and a duration:

    minute hour day-of-month month day-of-week

Each field is `*`, numbers, ranges `a-b` and steps `*/n` or `a-b/n`, separated by commas; days of the week are
0 to 7 (0 and 7 are Sunday) or `mon` to `sun`, months 1 to 12 or `jan` to `dec`. As in cron, if both days are
restricted then either is enough. A moment that the local clock skips does not open a window; of one that it
shows twice, the first does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

import msgspec

from fleetplane.fleet.rollouts.rules import amounts
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.times import NS

LONGEST_SECONDS = 7 * 86_400.0
SEARCH_DAYS = 366 * 8 + 2
"""How far ahead an opening is looked for: 29 February comes again after eight years at most."""
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_ITEM = re.compile(
    r"(?P<low>\*|[0-9]{1,2}|[a-z]{3})(?:-(?P<high>[0-9]{1,2}|[a-z]{3}))?(?:/(?P<step>[0-9]{1,2}))?"
)
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+){0,2}")


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Open for a duration from each moment that its expression names."""

    cron: str
    duration_seconds: float
    time_zone: str = "UTC"

    def check(self, field: str) -> None:
        """Refuse what cannot be read, and what never opens."""
        if not 60 <= self.duration_seconds <= LONGEST_SECONDS:
            raise InvalidArgument(
                f"must be between 60 and {LONGEST_SECONDS:g} seconds, not {self.duration_seconds:g}",
                field=f"{field}.duration_seconds",
            )
        try:
            _zone(self.time_zone)
        except (KeyError, OSError, ValueError):  # ZoneInfoNotFoundError is a KeyError
            raise InvalidArgument(
                f"{self.time_zone[:60]!r} is not a time zone that this machine knows",
                field=f"{field}.time_zone",
                hint="write a name such as Europe/Berlin, or UTC",
            ) from None
        try:
            schedule = _schedule(self.cron)
        except ValueError as error:
            raise InvalidArgument(
                f"{self.cron[:80]!r}: {error}", field=f"{field}.cron", hint="write it like '0 2 * * mon-fri'"
            ) from None
        if next(schedule.from_day(date(2000, 1, 1)), None) is None:
            raise InvalidArgument(f"{self.cron!r} names no day that exists", field=f"{field}.cron")


@dataclass(frozen=True, slots=True)
class _Schedule:
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    def has(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return by_day and by_weekday
        return by_day or by_weekday

    def from_day(self, day: date) -> Iterator[date]:
        return (found for ahead in range(SEARCH_DAYS) if self.has(found := day + timedelta(days=ahead)))


@lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    if not _ZONE.fullmatch(name):
        raise ValueError("not a time zone")
    return ZoneInfo(name)


@lru_cache(maxsize=256)
def _schedule(text: str) -> _Schedule:
    fields = text.lower().split()
    if len(fields) != 5:
        raise ValueError(f"has {len(fields)} fields, not five")
    minutes = _numbers(fields[0], 0, 59)
    hours = _numbers(fields[1], 0, 23)
    days = _numbers(fields[2], 1, 31)
    months = _numbers(fields[3], 1, 12, _MONTHS, first=1)
    weekdays = _numbers(fields[4], 0, 7, _DAYS)
    return _Schedule(
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(day % 7 for day in weekdays),
        fields[2] == "*",
        fields[4] == "*",
    )


def _numbers(text: str, low: int, high: int, names: Sequence[str] = (), *, first: int = 0) -> set[int]:
    def number(word: str) -> int:
        value = names.index(word) + first if word in names else int(word) if word.isdecimal() else -1
        if not low <= value <= high:
            raise ValueError(f"{word!r} is not between {low} and {high}")
        return value

    found: set[int] = set()
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if match is None or (match["low"] == "*" and match["high"]):
            raise ValueError(f"{item[:20]!r} cannot be read")
        step = int(match["step"] or 1)
        if step < 1:
            raise ValueError("a step is at least 1")
        if match["low"] == "*":
            begin, end = low, high
        else:
            begin = number(match["low"])
            end = number(match["high"]) if match["high"] else (high if match["step"] else begin)
        if end < begin:
            raise ValueError(f"{item!r} ends before it begins")
        found.update(range(begin, end + 1, step))
    return found


def _openings(window: Window, after: datetime) -> Iterator[datetime]:
    """Moments that open the window, from a day before `after` on, in order within each day."""
    schedule, zone = _schedule(window.cron), _zone(window.time_zone)
    for day in schedule.from_day(after.astimezone(zone).date()):
        for hour in schedule.hours:
            for minute in schedule.minutes:
                local = datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone)
                moment = local.astimezone(UTC)
                if moment.astimezone(zone).replace(fold=0) == local:  # else the local clock skips it
                    yield moment


def opens_at_ns(windows: Sequence[Window], now_ns: int) -> int | None:
    """When the first of some windows is open: `now_ns` if one is; None if none ever opens again."""
    if not windows:
        return now_ns
    now = datetime.fromtimestamp(now_ns / NS, UTC)
    found = []
    for window in windows:
        length = timedelta(seconds=window.duration_seconds)
        opening = next((one for one in _openings(window, now - length) if one + length > now), None)
        if opening is not None:
            if opening <= now:
                return now_ns
            found.append(opening)
    return round(min(found).timestamp()) * NS if found else None


WAVES_LIMIT = 50
GATES_LIMIT = 20
WINDOWS_LIMIT = 20
DAY_SECONDS = 86_400.0
REST = "rest"
LABEL = "label "


class OnHalt(StrEnum):
    WAIT = "wait"
    ROLL_BACK = "roll_back"


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition on a measurement of the targets that have moved. Without data it is not passed."""

    name: str
    query: str
    """A measurement that the subject has, such as `error_rate`; or `prometheus EXPRESSION`, `webhook URL` or
    `probe NAME`."""
    max: float | None = None
    """The most that the measurement may be."""
    min: float | None = None
    """The least."""
    max_increase: float | None = None
    """The most by which it may be above the same targets' value of before the rollout."""
    window_seconds: float = 300.0
    """The time over which it is measured, up to now; and before the rollout, for comparison."""
    halts: bool = False
    """Whether a breach halts at once; else it starts the soak anew, which `max_soak_seconds` bounds."""


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a rollout proceeds, when it stops and what it does then."""

    waves: tuple[str, ...] = ("1", "10%", "50%", "rest")
    """Each a number, a percentage of all targets, `label SELECTOR`, or `rest`, which is the last."""
    max_in_flight: str = "100%"
    """Targets of a wave that are asked at once and have not confirmed."""
    max_unavailable: str = "0"
    """Of all targets: how many may be without one at work while they are replaced. Only where a target is
    changed by replacing it."""
    max_failures: str = "0"
    """Of all targets; the rollout halts when more have failed."""
    max_failures_per_wave: str = "100%"
    """Of the targets of the wave that is under way."""
    max_offline: str = "10%"
    """Of a wave: targets that it may go on without. The last wave waits for all until `deliver_seconds`."""
    confirm_seconds: float = 120.0
    """How long a target that is connected may take to confirm."""
    deliver_seconds: float = 3600.0
    """How long a target that is not connected is waited for, from the start of its wave."""
    unhealthy_seconds: float = 0.0
    """How long a target that has moved may be unhealthy before it has failed."""
    soak_seconds: float = 60.0
    """How long health and gates must hold without a break after a wave."""
    max_soak_seconds: float = 600.0
    """How long that may take; then the rollout halts."""
    gates: tuple[Gate, ...] = ()
    windows: tuple[Window, ...] = ()
    """A wave starts only while one of them is open; at any time if there are none."""
    approvals: tuple[int, ...] = ()
    """Waves, counted from 1, that start only after somebody approved them."""
    on_halt: OnHalt = OnHalt.WAIT
    roll_back_in_flight: str = "100%"
    """Targets that go back at once."""
    roll_back_max_failures: str = "100%"
    """Of the targets that go back; the roll back halts when more could not."""

    def check(self) -> None:
        """Refuse what cannot be meant, naming the field."""
        self._check_waves()
        for name in (
            "max_unavailable",
            "max_failures",
            "max_failures_per_wave",
            "max_offline",
            "roll_back_max_failures",
        ):
            amounts.check(getattr(self, name), field=name)
        for name in ("max_in_flight", "roll_back_in_flight"):
            amounts.check(getattr(self, name), field=name, at_least_one=True)
        _seconds("confirm_seconds", self.confirm_seconds, low=1.0, high=DAY_SECONDS)
        _seconds("deliver_seconds", self.deliver_seconds, low=1.0, high=90 * DAY_SECONDS)
        _seconds("unhealthy_seconds", self.unhealthy_seconds, low=0.0, high=DAY_SECONDS)
        _seconds("soak_seconds", self.soak_seconds, low=0.0, high=30 * DAY_SECONDS)
        _seconds("max_soak_seconds", self.max_soak_seconds, low=1.0, high=60 * DAY_SECONDS)
        if self.max_soak_seconds < self.soak_seconds:
            raise InvalidArgument(
                f"is {self.max_soak_seconds:g}, less than soak_seconds, {self.soak_seconds:g}",
                field="max_soak_seconds",
            )
        for number in self.approvals:
            if not 1 <= number <= len(self.waves):
                raise InvalidArgument(
                    f"there is no wave {number}: there are {len(self.waves)}", field="approvals"
                )
        self._check_gates()
        if len(self.windows) > WINDOWS_LIMIT:
            raise InvalidArgument(f"has {len(self.windows)}, more than {WINDOWS_LIMIT}", field="windows")
        for at, window in enumerate(self.windows):
            window.check(f"windows[{at}]")

    def _check_waves(self) -> None:
        if not 1 <= len(self.waves) <= WAVES_LIMIT:
            raise InvalidArgument(f"must be 1 to {WAVES_LIMIT} waves, not {len(self.waves)}", field="waves")
        for at, wave in enumerate(self.waves):
            field, is_last = f"waves[{at}]", at == len(self.waves) - 1
            if (wave == REST) is not is_last:
                raise InvalidArgument(
                    "the last wave is `rest`, and no other", field=field, hint="end the waves with rest"
                )
            if wave.startswith(LABEL):
                if not wave.removeprefix(LABEL).strip():
                    raise InvalidArgument("has no selector after `label`", field=field)
            elif wave != REST:
                amounts.check(wave, field=field, at_least_one=True)

    def _check_gates(self) -> None:
        if len(self.gates) > GATES_LIMIT:
            raise InvalidArgument(f"has {len(self.gates)}, more than {GATES_LIMIT}", field="gates")
        names = [gate.name for gate in self.gates]
        for at, gate in enumerate(self.gates):
            field = f"gates[{at}]"
            if not gate.name or len(gate.name) > 100 or names.count(gate.name) > 1:
                raise InvalidArgument("each gate has a name of its own", field=f"{field}.name")
            bounds = [one for one in (gate.max, gate.min, gate.max_increase) if one is not None]
            if not bounds or not all(map(math.isfinite, bounds)):
                raise InvalidArgument("needs max, min or max_increase, each a finite number", field=field)
            _seconds(f"{field}.window_seconds", gate.window_seconds, low=1.0, high=7 * DAY_SECONDS)


def _seconds(field: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"must be between {low:g} and {high:g} seconds, not {value:g}", field=field)
