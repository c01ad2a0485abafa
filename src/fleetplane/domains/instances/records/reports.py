"""The latest reports of agents, in memory; lasting consequences are written by the controllers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleetplane.kernel.clock import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One health report, in one form for all generations."""

    instance: str
    version: str = ""
    count: int = 0
    config_hash: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files on the instance: empty text for one that is well, else what is wrong with it."""
    issued: Mapping[str, int] = field(default_factory=dict)
    """When those of them that are certificates, and are well, were written, by the agent's clock."""
    termination_action: str = ""
    """Not empty: the provider announced that it will take the instance away."""
    termination_deadline_ns: int | None = None
    cpu_usage: float | None = None
    memory_usage: float | None = None
    conntrack_percent: float | None = None
    """How full the table of tracked connections is."""
    dropped_packets: int | None = None
    """Counted since the machine started, in both directions."""
    received_bytes: int | None = None
    sent_bytes: int | None = None
    """Counted since the machine started, of the interface that it watches."""
    connections: Mapping[int, int] = field(default_factory=dict)
    """TCP connections by target port."""


@dataclass(slots=True)
class Heard:
    at_ns: int
    report: Report


class Reports:
    """The last report of every instance; a new server gives everyone the time it has itself."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_at_ns = clock.now_ns()
        self._heard: dict[str, Heard] = {}
        self.received = 0

    def __repr__(self) -> str:
        return f"<Reports instances={len(self._heard)} received={self.received}>"

    def take(self, report: Report) -> None:
        self.received += 1
        self._heard[report.instance] = Heard(at_ns=self._clock.now_ns(), report=report)

    def heard_at_ns(self, instance: str, registered_at_ns: int | None) -> int | None:
        """When it was last heard; before its first report, when it registered or we started.

        A report from a moment that has yet to come was taken before the clock was set back.
        """
        if (heard := self._heard.get(instance)) is not None:
            heard.at_ns = min(heard.at_ns, self._clock.now_ns())
            return heard.at_ns
        return None if registered_at_ns is None else max(registered_at_ns, self._started_at_ns)

    def last(self, instance: str) -> Heard | None:
        return self._heard.get(instance)

    def forget(self, instance: str) -> None:
        self._heard.pop(instance, None)
