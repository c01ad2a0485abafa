"""The traffic of a stretch of time, put together from summaries. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from fleetplane.domains.proxies.traffic.summary import (
    FREQUENT,
    Frequent,
    TrafficCounts,
    TrafficPlace,
    TrafficSummary,
    read_figures,
    read_summary,
)
from fleetplane.kernel.telemetry.summaries import FoundSummary

K = TypeVar("K")

FOLDED_AT: Final = 10_000
"""Different values that are looked at together before the rare ones are let go."""


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of a stretch of time."""

    total: TrafficSummary
    over_time: Mapping[int, TrafficSummary]
    """By the second at which each stretch begins."""
    hosts: Mapping[str, TrafficSummary]
    sources: Mapping[str, TrafficSummary]
    places: Mapping[TrafficPlace, TrafficSummary] = {}
    """By location and upstream, where that was asked for."""

    @property
    def upstreams(self) -> Mapping[str, TrafficSummary]:
        """Of what was passed on to a group of servers."""
        return _summed((place.upstream, said) for place, said in self.places.items() if place.upstream)


@dataclass(slots=True)
class _Gathered:
    """Each summary is added twice, whatever is made of it: to its subject and source, and to its moment."""

    cells: dict[tuple[str, str], TrafficSummary] = field(default_factory=dict)
    over_time: dict[int, TrafficSummary] = field(default_factory=dict)

    def add(self, one: FoundSummary, said: TrafficCounts, step_seconds: int) -> None:
        at = one.at_seconds - one.at_seconds % max(step_seconds, one.width_seconds)
        _into(self.cells, (one.subject, one.source), said)
        _into(self.over_time, at, said)


def report(
    found: Iterable[FoundSummary], *, step_seconds: int, host: str = "", source: str = ""
) -> TrafficReport:
    """Summaries by virtual host put together: in all, over time, by virtual host, and by agent."""
    gathered = _Gathered()
    seen: dict[str, Counter[str]] = {name: Counter() for name in FREQUENT}
    frequent = {name: Frequent() for name in FREQUENT}
    for one in found:
        if (host and one.subject != host) or (source and one.source != source):
            continue
        said = read_summary(one.body)
        gathered.add(one, said, step_seconds)
        for name, counts in seen.items():
            theirs: Frequent = getattr(said, name)
            for value, times in theirs.counts.items():
                counts[value] += times
            frequent[name].missed += theirs.missed
            if len(counts) > FOLDED_AT:
                frequent[name].add(counts)
                counts.clear()
    for name, counts in seen.items():
        frequent[name].add(counts)
    made = _reported(gathered, host_of=str)
    for name, most in frequent.items():
        setattr(made.total, name, most)
    return made


def total(found: Iterable[FoundSummary], *, host: str = "", source: str = "") -> TrafficSummary:
    """All of it, without the most frequent values: these are not even read."""
    made = TrafficSummary()
    for one in found:
        if (not host or one.subject == host) and (not source or one.source == source):
            made.add_figures(read_figures(one.body))
    return made


def placed(
    found: Iterable[FoundSummary],
    *,
    step_seconds: int,
    host: str = "",
    source: str = "",
    location: str = "",
    upstream: str = "",
) -> TrafficReport:
    """Summaries by place put together, without frequent values. An empty text asks for any."""
    gathered = _Gathered()
    places: dict[str, TrafficPlace] = {}
    for one in found:
        place = places.setdefault(one.subject, TrafficPlace.parse(one.subject))
        wanted = ((host, place.host), (source, one.source), (location, place.location))
        if all(not asked or asked == told for asked, told in (*wanted, (upstream, place.upstream))):
            gathered.add(one, read_figures(one.body), step_seconds)
    made = _reported(gathered, host_of=lambda subject: places[subject].host)
    by_place = _summed((places[subject], said) for (subject, _), said in gathered.cells.items())
    return msgspec.structs.replace(made, places=by_place)


def _reported(gathered: _Gathered, *, host_of: Callable[[str], str]) -> TrafficReport:
    total = TrafficSummary()
    for said in gathered.cells.values():
        total.add_figures(said)
    return TrafficReport(
        total=total,
        over_time=dict(sorted(gathered.over_time.items())),
        hosts=_summed((host_of(subject), said) for (subject, _), said in gathered.cells.items()),
        sources=_summed((source, said) for (_, source), said in gathered.cells.items()),
    )


def _summed(parts: Iterable[tuple[K, TrafficSummary]]) -> dict[K, TrafficSummary]:
    made: dict[K, TrafficSummary] = {}
    for key, said in parts:
        _into(made, key, said)
    return made


def _into(made: dict[K, TrafficSummary], key: K, said: TrafficCounts) -> None:
    known = made.get(key)
    if known is None:
        known = made[key] = TrafficSummary()
    known.add_figures(said)
