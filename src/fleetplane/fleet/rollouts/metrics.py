"""The numbers of rollouts, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.fleet.rollouts.records import status_of
from fleetplane.fleet.rollouts.rollouts import Rollouts
from fleetplane.kernel.rollout.states import ENDED, OUTCOMES, RolloutPhase

PREFIX = "fleetplane_rollout"


class RolloutCollector(Collector):
    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def collect(self) -> Iterator[Metric]:
        found = Counter(status_of(one).phase for one in self._rollouts.book.unfinished())
        gauge = GaugeMetricFamily(
            f"{PREFIX}s_open", "Rollouts that have not ended, by phase", labels=["phase"]
        )
        for phase in RolloutPhase:
            if phase not in ENDED:
                gauge.add_metric([phase], found[phase])
        yield gauge
        outcomes = CounterMetricFamily(
            f"{PREFIX}_targets", "Targets of rollouts that ended, by outcome", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            outcomes.add_metric([outcome], self._rollouts.driver.outcomes[outcome])
        yield outcomes
        halts = CounterMetricFamily(f"{PREFIX}_halts", "Halts of rollouts, by their cause", labels=["cause"])
        for cause, number in sorted(self._rollouts.driver.halts.items()):
            halts.add_metric([cause], number)
        yield halts
