"""What requests came to: counts, bytes, latencies, the most frequent values, and reports of them. Pure.

A summary is made of one agent's lines about one virtual host, and summaries add up. Counts are exact. A
latency percentile is within `ERROR` of a request that was really there: latencies are counted in bins whose
edges grow by the same factor, as DDSketch does it. Of the most frequent values, `missed` says how much more
often one may have been there than is told.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import field as dataclass_field
from functools import lru_cache
from itertools import islice
from operator import add, itemgetter
from typing import Final, TypeVar

import msgspec

from fleetplane.domains.proxies.traffic.fields import ACCESS, PLACE, Row
from fleetplane.kernel.telemetry import LogRecord
from fleetplane.kernel.telemetry.summaries import FoundSummary

ERROR: Final = 0.01
"""Of a percentile, relative."""
TOP_KEPT: Final = 20
"""Values of each kind in a summary. With 100 bytes each, a summary has 8 KB at most, and one host on one
agent (60 + 48 + 35 summaries) takes 1.2 MB; few have half of it."""
TOP_TOLD: Final = 10
VALUE_LIMIT: Final = 100
"""Characters of a value."""
STATUS_CLASSES: Final = ("other", "1xx", "2xx", "3xx", "4xx", "5xx")
"""As they are counted: by the first digit of the status."""
FREQUENT: Final = ("paths", "clients", "referrers", "agents")
PERCENTILES: Final = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_GROWTH: Final = (1 + ERROR) / (1 - ERROR)
_LOG_GROWTH: Final = math.log(_GROWTH)
_SHORTEST_MS, _LONGEST_MS = 0.001, 86_400_000.0
"""A microsecond to a day: 1,260 bins at most, however an agent spells its latencies."""
BYTES_MOST: Final = 1 << 62
"""Of a sum: an agent may say that requests were larger, and a summary could not be written."""
_NUMBER_LIMIT, _ATTEMPTS_LIMIT = 32, 256
"""Characters of a number and of a list of attempts that are looked at: what is remembered of an agent's texts
stays small."""
_CLASSES: Final = ("1", "2", "3", "4", "5")
_NOTHING: Final = ("", "-")
_CACHED: Final = frozenset({"HIT", "STALE", "UPDATING", "REVALIDATED"})

PLACES: Final = "access/places"
"""The kind of summaries by place."""


def _fields(*names: str) -> Callable[[Row], Row]:
    return itemgetter(*(PLACE[name] for name in names))


_FIGURES: Final = _fields(
    "request_length", "bytes_sent", "status", "cache_status", "upstream_statuses", "response_time_ms"
)
_VALUES: Final = _fields("uri", "remote_addr", "referer", "user_agent")
_PLACE: Final = _fields("virtual_host_id", "location", "upstream_id")
_STREAM: Final = PLACE["stream_id"]


class TrafficPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request went: a location of a virtual host, and the upstream that it was passed on to."""

    host: str
    location: str
    upstream: str

    @property
    def key(self) -> str:
        """As the subject of a summary. The location is last: it is what may be too long."""
        return f"{self.host}\n{self.upstream}\n{self.location}"

    @classmethod
    def parse(cls, key: str) -> TrafficPlace:
        host, _, rest = key.partition("\n")
        upstream, _, location = rest.partition("\n")
        return cls(host=host, location=location, upstream=upstream)


class Frequent(msgspec.Struct, array_like=True):
    """The most frequent values of something."""

    counts: dict[str, int] = {}
    missed: int = 0
    """How often any value may have been there beyond what is counted."""

    def add(self, counts: Mapping[str, int], missed: int = 0) -> None:
        made = dict(self.counts)
        for value, times in counts.items():
            made[value] = made.get(value, 0) + times
        self.missed += missed
        if len(made) > TOP_KEPT:
            least = sorted(made.values(), reverse=True)[TOP_KEPT]
            self.missed += least
            kept = {value: times for value, times in made.items() if times > least}
            # Of those that are as frequent as the first that is let go, there is room for the first few.
            equal = (value for value, times in made.items() if times == least)
            made = kept | dict.fromkeys(islice(equal, TOP_KEPT - len(kept)), least)
        self.counts = made


class TrafficCounts(msgspec.Struct, array_like=True):
    """All of a summary but the most frequent values."""

    requests: int = 0
    received: int = 0
    """Bytes; so for the next."""
    sent: int = 0
    classes: list[int] = msgspec.field(default_factory=lambda: [0] * 6)
    """By the first digit of the status; the first for what has none."""
    bins: dict[int, int] = {}
    """Requests by the bin of their latency; 0 ms is below all bins."""
    instant: int = 0
    cache_hits: int = 0
    cache_asked: int = 0
    upstream_failures: int = 0
    """Attempts at a server behind that failed, or answered 5xx."""


class TrafficSummary(TrafficCounts, array_like=True):
    """What requests came to."""

    paths: Frequent = msgspec.field(default_factory=Frequent)
    clients: Frequent = msgspec.field(default_factory=Frequent)
    referrers: Frequent = msgspec.field(default_factory=Frequent)
    agents: Frequent = msgspec.field(default_factory=Frequent)

    def add(self, other: TrafficSummary) -> None:
        self.add_figures(other)
        for name in FREQUENT:
            theirs: Frequent = getattr(other, name)
            getattr(self, name).add(theirs.counts, theirs.missed)

    def add_figures(self, other: TrafficCounts) -> None:
        """All but the most frequent values."""
        self.requests += other.requests
        self.received += other.received
        self.sent += other.sent
        self.instant += other.instant
        self.cache_hits += other.cache_hits
        self.cache_asked += other.cache_asked
        self.upstream_failures += other.upstream_failures
        self._bound()
        self.classes = list(map(add, self.classes, other.classes))
        bins = self.bins
        for number, times in other.bins.items():
            bins[number] = bins.get(number, 0) + times

    def count(self, rows: Sequence[Row], *, frequent: bool = True) -> None:
        """Add requests: column by column, each different value once.

        Without the most frequent values where these are counted for a wider subject.
        """
        if not rows:
            return
        columns = [Counter(column) for column in zip(*map(_FIGURES, rows), strict=True)]
        lengths, sizes, statuses, cached, attempts, latencies = columns
        self.requests += len(rows)
        self.received += sum([_integer(length[:_NUMBER_LIMIT]) * times for length, times in lengths.items()])
        self.sent += sum([_integer(size[:_NUMBER_LIMIT]) * times for size, times in sizes.items()])
        self._bound()
        for status, times in statuses.items():
            self.classes[int(status[0]) if status[:1] in _CLASSES else 0] += times
        for said, times in cached.items():
            if said not in _NOTHING:
                self.cache_asked += times
                self.cache_hits += times * (said in _CACHED)
        for tried, times in attempts.items():
            self.upstream_failures += _failures(tried[:_ATTEMPTS_LIMIT]) * times
        for latency, times in latencies.items():
            if (number := _bin(latency[:_NUMBER_LIMIT])) is None:
                self.instant += times
            else:
                self.bins[number] = self.bins.get(number, 0) + times
        if frequent:
            self.count_frequent(rows)

    def count_frequent(self, rows: Sequence[Row]) -> None:
        paths, clients, referrers, agents = zip(*map(_VALUES, rows), strict=True)
        self.paths.add(_told(Counter([uri.partition("?")[0] for uri in paths])))
        self.clients.add(_told(Counter(clients)))
        self.referrers.add(_told(Counter(referrers)))
        self.agents.add(_told(Counter(agents)))

    def _bound(self) -> None:
        self.received, self.sent = min(self.received, BYTES_MOST), min(self.sent, BYTES_MOST)

    def percentile(self, share: float) -> float:
        """Milliseconds within which a share of the requests was answered; 0 if there were none."""
        rank = share * (self.requests - 1)
        seen = self.instant
        if rank < seen or not self.bins:
            return 0.0
        number = 0
        for number, times in sorted(self.bins.items()):  # noqa: B007  # the last one where sums are off
            seen += times
            if rank < seen:
                break
        return 2 * _GROWTH**number / (_GROWTH + 1)


def _told(values: Mapping[str, int]) -> Mapping[str, int]:
    """As they are told: cut, and without what says nothing."""
    made: dict[str, int] = {}
    for value, times in values.items():
        if value not in _NOTHING:
            short = value[:VALUE_LIMIT]
            made[short] = made.get(short, 0) + times
    return made


@lru_cache(maxsize=65_536)
def _bin(text: str) -> int | None:
    """The bin of a latency in milliseconds; None for 0, and for what is no number."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not value > 0:
        return None
    return math.ceil(math.log(min(max(value, _SHORTEST_MS), _LONGEST_MS)) / _LOG_GROWTH)


@lru_cache(maxsize=4_096)
def _failures(attempts: str) -> int:
    """Of the statuses of the servers that were tried, such as `502, 200`."""
    return sum(one.strip().startswith("5") for one in attempts.replace(":", ",").split(","))


@lru_cache(maxsize=65_536)
def _integer(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else 0


# As the kernel keeps it.

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(TrafficSummary)
read_summary: Final = _DECODER.decode
read_figures: Final = msgspec.msgpack.Decoder(TrafficCounts).decode
"""Much faster: what follows is skipped."""


@dataclass(slots=True)
class RequestTotals:
    """What was summed up since the server started, for counters. Written by one thread, read by others."""

    classes: list[int] = dataclass_field(default_factory=lambda: [0] * 6)
    received: int = 0
    sent: int = 0
    cache_hits: int = 0
    upstream_failures: int = 0

    def grow(self, more: TrafficSummary) -> None:
        self.classes = [one + further for one, further in zip(self.classes, more.classes, strict=True)]
        for name in ("received", "sent", "cache_hits", "upstream_failures"):
            setattr(self, name, getattr(self, name) + getattr(more, name))


class AccessSummarizer:
    """Of lines of the access log: by virtual host, and without frequent values by place."""

    stream = ACCESS
    kinds = (ACCESS, PLACES)

    def __init__(self) -> None:
        self.totals = RequestTotals()

    def digest(self, lines: Sequence[LogRecord]) -> Mapping[tuple[str, str], bytes]:
        by_place: dict[Row, list[Row]] = {}
        for line in lines:
            row = line.detail
            if not row[_STREAM]:
                by_place.setdefault(_PLACE(row), []).append(row)
        hosts: dict[str, tuple[TrafficSummary, list[Row]]] = {}
        made: dict[tuple[str, str], bytes] = {}
        for (host, location, upstream), rows in by_place.items():
            said = TrafficSummary()
            said.count(rows, frequent=False)
            if location or upstream:  # agents from before do not tell
                made[PLACES, TrafficPlace(host=host, location=location, upstream=upstream).key] = (
                    _ENCODER.encode(said)
                )
            summary, theirs = hosts.setdefault(host, (TrafficSummary(), []))
            summary.add_figures(said)
            theirs += rows
        for host, (summary, rows) in hosts.items():
            summary.count_frequent(rows)
            self.totals.grow(summary)
            made[ACCESS, host] = _ENCODER.encode(summary)
        return made

    def merged(self, bodies: Sequence[bytes]) -> bytes:
        made = TrafficSummary()
        for body in bodies:
            made.add(_DECODER.decode(body))
        return _ENCODER.encode(made)


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
