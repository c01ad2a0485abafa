"""The instances domain's numbers, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules import quotas

PREFIX = "fleetplane_instances_"


class InstanceCollector(Collector):
    def __init__(
        self, instances: Instances, groups: Groups, reports: InstanceReports, held: Callable[[], int]
    ) -> None:
        """`held` counts silent instances that are left alone because too many fell silent at once."""
        self._instances = instances
        self._groups = groups
        self._reports = reports
        self._held = held

    def collect(self) -> Iterator[Metric]:
        states = Counter(rules.state(instance) for instance in self._instances.all())
        family = GaugeMetricFamily(PREFIX + "count", "Instances by state", labels=["state"])
        for state in rules.State:
            family.add_metric([state], states[state])
        yield family
        views = self._groups.views()
        yield GaugeMetricFamily(PREFIX + "groups", "Groups there are", len(views))
        yield GaugeMetricFamily(
            PREFIX + "desired",
            "Instances wanted by all groups",
            sum(view.group.size for view in views.values()),
        )
        yield GaugeMetricFamily(
            PREFIX + "held", "Silent instances left alone because many fell silent at once", self._held()
        )
        family = GaugeMetricFamily(
            PREFIX + "quota_used_ratio",
            "Share of a tenant's instances that it has; of tenants that come close to their bound",
            labels=["tenant"],
        )
        for tenant in sorted({tenant for tenant, _ in views}):
            limit, used = self._groups.quota(tenant), quotas.usage(self._instances.all(tenant))
            if limit and quotas.near(tenant, used, limit):
                family.add_metric([tenant], used.standing / limit)
        if family.samples:
            yield family
        yield CounterMetricFamily(PREFIX + "reports", "Health reports taken", self._reports.received)
