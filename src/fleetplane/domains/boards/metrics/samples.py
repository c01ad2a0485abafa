"""Metrics of boards, from either family of messages to one set of series. Pure.

Percentages and degrees are gauges; what counts up on the board is a counter, so that its growth
can be asked for over restarts. The original metrics and the documented ones come to the same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from fleetplane.domains.boards.ports import BoardMeasurements
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi_agent

INTERFACES_LIMIT = 16
DISKS_LIMIT = 16
ZONES_LIMIT = 16
"""Of each, those that are kept of one sample; a board has one or two."""
LABEL_LIMIT = 64

FLAT: Final = ("cpu_usage", "memory_usage", "temperature", "disk_usage")
_POWER: Final = (
    "under_voltage_now",
    "frequency_capped_now",
    "throttled_now",
    "soft_temp_limit_now",
    "under_voltage_seen",
    "frequency_capped_seen",
    "throttled_seen",
    "soft_temp_limit_seen",
)
_COUNTED: Final = ("bytes_sent", "bytes_recv", "packets_sent", "packets_recv", "err_in", "err_out")


def of_flat(metrics: pb.SystemMetrics, *, at_ns: int) -> BoardMeasurements:
    """What could not be read is left out: its zero would be taken for a value."""
    missing = frozenset(metrics.unavailable)
    gauges = {name: float(getattr(metrics, name)) for name in FLAT if name not in missing}
    if metrics.uptime_seconds:
        gauges["uptime_seconds"] = float(metrics.uptime_seconds)
    if metrics.HasField("power") and "power" not in missing:
        gauges.update({f"power/{name}": float(getattr(metrics.power, name)) for name in _POWER})
    counters = dict(_network((one.name, one) for one in metrics.interfaces))
    if metrics.HasField("detail"):
        nested = of_nested(metrics.detail, at_ns=at_ns)
        gauges = {**nested.gauges, **gauges}
        counters = {**nested.counters, **counters}
    return _sound(at_ns, gauges, counters)


def of_nested(metrics: pi_agent.SystemMetrics, *, at_ns: int) -> BoardMeasurements:
    """A group that is not there was not measured."""
    gauges: dict[str, float] = {}
    if metrics.HasField("cpu"):
        gauges["cpu_usage"] = metrics.cpu.usage_percent
    if metrics.HasField("memory"):
        gauges["memory_usage"] = metrics.memory.usage_percent
        gauges["memory_available_bytes"] = float(metrics.memory.available_bytes)
    for disk in metrics.disks[:DISKS_LIMIT]:
        if disk.mountpoint == "/":
            gauges["disk_usage"] = disk.usage_percent
        gauges[f"disk/{_label(disk.mountpoint)}/usage"] = disk.usage_percent
    zones = metrics.thermal.zones[:ZONES_LIMIT]
    if zones:
        gauges["temperature"] = max(zone.temperature_celsius for zone in zones)
    if metrics.HasField("load"):
        gauges["load1"] = metrics.load.load1
    if metrics.HasField("processes"):
        gauges["processes"] = float(metrics.processes.total)
    return _sound(at_ns, gauges, dict(_network((one.interface, one) for one in metrics.network)))


def _network(
    interfaces: Iterable[tuple[str, pb.NetworkInterface | pi_agent.NetworkMetrics]],
) -> Iterator[tuple[str, float]]:
    for number, (name, counts) in enumerate(interfaces):
        if number == INTERFACES_LIMIT:
            return
        for field in _COUNTED:
            yield f"network/{_label(name)}/{field}", float(getattr(counts, field))


def _label(text: str) -> str:
    return text[:LABEL_LIMIT]


def _sound(at_ns: int, gauges: dict[str, float], counters: dict[str, float]) -> BoardMeasurements:
    return BoardMeasurements(
        at_ns=at_ns,
        gauges={name: value for name, value in gauges.items() if math.isfinite(value)},
        counters=counters,
    )
