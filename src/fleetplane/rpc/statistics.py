"""What is counted about calls: plain integers changed on the event loop, exported at scrape.

Labels are bounded by construction: listeners and methods come from the method table, codes
from gRPC, bounds from `Bound`. A path that a stranger invents is never a label.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fleetplane.rpc.serving.guard import Bound
from fleetplane.rpc.serving.status import CODE_NAMES, OK

LATENCY_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LABELS: Final = ("listener", "method")


class MethodStatistics:
    """The numbers of one method on one listener."""

    __slots__ = (
        "active",
        "buckets",
        "finished",
        "listener",
        "path",
        "received",
        "seconds",
        "sent",
        "started",
    )

    def __init__(self, listener: str, path: str) -> None:
        self.listener = listener
        self.path = path
        self.started = 0
        self.active = 0
        self.finished: dict[int, int] = {}
        """Calls by their final status code."""
        self.received = 0
        """Messages from callers."""
        self.sent = 0
        """Messages to callers."""
        self.seconds = 0.0
        """Time spent in finished calls, together."""
        self.buckets = [0] * (len(LATENCY_BUCKETS) + 1)
        """Finished calls by latency, not cumulative; the last is everything slower."""

    def finish(self, code: int, seconds: float) -> None:
        self.active -= 1
        self.finished[code] = self.finished.get(code, 0) + 1
        self.seconds += seconds
        self.buckets[bisect_left(LATENCY_BUCKETS, seconds)] += 1

    def served(self, messages: int, seconds: float) -> None:
        """Count a call with one message in and a good ending that never waited, all at once."""
        self.started += 1
        self.received += 1
        self.sent += messages
        self.finished[OK] = self.finished.get(OK, 0) + 1
        self.seconds += seconds
        # What never waits is nearly always faster than the first bound.
        self.buckets[0 if seconds <= LATENCY_BUCKETS[0] else bisect_left(LATENCY_BUCKETS, seconds)] += 1

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """Finished calls by latency, as Prometheus counts them: each bucket holds the faster ones too."""
        bounds = [*(str(bound) for bound in LATENCY_BUCKETS), "+Inf"]
        return list(zip(bounds, accumulate(self.buckets), strict=True))

    def __repr__(self) -> str:
        return f"<MethodStatistics {self.path} started={self.started} active={self.active}>"


class CallStatistics:
    """The numbers of every method of every listener that shares this object."""

    def __init__(self) -> None:
        self._methods: dict[tuple[str, str], MethodStatistics] = {}
        self.bounds: Counter[Bound] = Counter()
        """How often each bound turned a caller away or cut something short."""
        self.unknown_methods = 0
        """Calls to unknown paths."""
        self.refused_requests = 0
        """Requests that are no gRPC calls at all."""

    def method(self, listener: str, path: str) -> MethodStatistics:
        key = (listener, path)
        if key not in self._methods:
            self._methods[key] = MethodStatistics(listener, path)
        return self._methods[key]

    def methods(self) -> Iterator[MethodStatistics]:
        return iter(tuple(self._methods.values()))

    def hit(self, bound: Bound) -> None:
        self.bounds[bound] += 1

    def collector(self) -> Collector:
        return _Collector(self)

    def __repr__(self) -> str:
        active = sum(method.active for method in self._methods.values())
        return f"<CallStatistics methods={len(self._methods)} active={active}>"


class _Collector(Collector):
    def __init__(self, statistics: CallStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        # A method that nobody has called yet has nothing to tell: fourteen series each, for some 170 methods.
        methods = tuple(method for method in self._statistics.methods() if method.started)
        yield _counter("started", "Calls begun.", ((m, m.started) for m in methods))
        yield _counter("messages_received", "Messages from callers.", ((m, m.received) for m in methods))
        yield _counter("messages_sent", "Messages to callers.", ((m, m.sent) for m in methods))
        active = GaugeMetricFamily("fleetplane_rpc_active", "Calls running now.", labels=_LABELS)
        for method in methods:
            active.add_metric((method.listener, method.path), method.active)
        yield active
        yield _finished(methods)
        yield _latency(methods)
        yield from self._refusals()

    def _refusals(self) -> Iterator[Metric]:
        bounds = CounterMetricFamily("fleetplane_rpc_bound_hits", "Times a bound was hit.", labels=("bound",))
        for bound in Bound:
            bounds.add_metric((bound.value,), self._statistics.bounds[bound])
        yield bounds
        unknown = self._statistics.unknown_methods
        yield CounterMetricFamily("fleetplane_rpc_unknown_methods", "Calls to unserved paths.", value=unknown)
        refused = self._statistics.refused_requests
        yield CounterMetricFamily(
            "fleetplane_rpc_refused_requests", "Requests that are not gRPC.", value=refused
        )


def _counter(name: str, text: str, values: Iterable[tuple[MethodStatistics, int]]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"fleetplane_rpc_{name}", text, labels=_LABELS)
    for method, value in values:
        family.add_metric((method.listener, method.path), value)
    return family


def _finished(methods: Iterable[MethodStatistics]) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "fleetplane_rpc_finished", "Calls by final status.", labels=(*_LABELS, "code")
    )
    for method in methods:
        for code, count in sorted(method.finished.items()):
            family.add_metric((method.listener, method.path, CODE_NAMES.get(code, "UNKNOWN")), count)
    return family


def _latency(methods: Iterable[MethodStatistics]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "fleetplane_rpc_seconds", "Time from a call's start to its end.", labels=_LABELS
    )
    for method in methods:
        family.add_metric((method.listener, method.path), method.cumulative_buckets(), method.seconds)
    return family
