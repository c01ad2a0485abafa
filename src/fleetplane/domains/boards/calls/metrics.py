"""The numbers of what this server does with boards, for Prometheus, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetplane.domains.boards.calls.channels import NodeLinks
from fleetplane.domains.boards.commands.courier import BoardCommander
from fleetplane.domains.boards.logs.relay import LogsRelay

PREFIX = "fleetplane_boards_"


class NodeCollector(Collector):
    def __init__(self, links: NodeLinks, logs: LogsRelay, commander: BoardCommander) -> None:
        self._links = links
        self._logs = logs
        self._commander = commander

    def collect(self) -> Iterator[Metric]:
        links, logs = self._links.statistics(), self._logs.statistics()
        gauges = (
            ("channels", "Channels to boards that are open", links.channels),
            ("calls", "Calls to boards under way, streams among them", links.calls),
            ("log_readers", "Readers of boards' logs", logs.readers),
            ("commands_open", "Targets of commands without an outcome", self._commander.ledger.open_count),
        )
        counters = (
            ("calls_made", "Calls to boards", links.made),
            ("calls_failed", "Calls to boards that found nobody, or no answer in time", links.lost),
            ("log_entries", "Log entries passed on", logs.entries),
            ("log_entries_dropped", "Log entries that boards dropped for slow readers", logs.dropped),
            ("log_streams_resumed", "Log streams that went on after a broken connection", logs.resumed),
            ("log_readers_refused", "Readers of logs for whom there was no room", logs.refused),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(PREFIX + name, text, value=value)
