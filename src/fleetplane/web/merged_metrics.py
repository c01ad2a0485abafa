"""Several collectors as one: numbers of the same name, from different domains, stand together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class MergedMetrics(Collector):
    """A registry takes each name once; domains tell theirs apart by a label."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = tuple(collectors)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples.extend(metric.samples)
        yield from families.values()
