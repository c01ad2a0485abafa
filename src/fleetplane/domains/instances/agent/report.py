"""A health report, from what was read. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fleetplane.domains.instances.agent.machine import MachineSample
from fleetplane.domains.instances.agent.spot import SpotNotice
from fleetplane.gen.nstance.v1 import agent_pb2
from fleetplane.kernel.values import durations
from fleetplane.kernel.values.timestamps import timestamp


def health_report(
    *,
    version: str,
    instance_id: str,
    count: int,
    now_ns: int,
    reading: MachineSample,
    modified_ns: Mapping[str, int],
    errors: Mapping[str, str],
    notice: SpotNotice | None,
    config_hash: str,
) -> agent_pb2.HealthReportRequest:
    files = {name: agent_pb2.FileStatus(last_modified=timestamp(at)) for name, at in modified_ns.items()}
    files |= {name: agent_pb2.FileStatus(error=words or "refused") for name, words in errors.items()}
    return agent_pb2.HealthReportRequest(
        version=version,
        instance_id=instance_id,
        timestamp=timestamp(now_ns),
        count=count,
        uptime=durations.format(int(reading.uptime_seconds)),
        metrics=_metrics(reading),
        files=files,
        termination_notice=None if notice is None else _termination(notice),
        config_hash=config_hash,
    )


def _metrics(reading: MachineSample) -> agent_pb2.Metrics:
    metrics = agent_pb2.Metrics(
        cpu_usage=reading.cpu_percent,
        cpu_core_usage=reading.core_percents,
        memory_usage=reading.memory_percent,
        network_interface_error=reading.interface_error or None,
        conntrack_count=reading.conntrack_count,
        conntrack_max=reading.conntrack_max,
        conntrack_error=reading.conntrack_error or None,
        ebpf_error=reading.ebpf_error or None,
    )
    if counters := reading.interface_counters:
        metrics.network_interface.CopyFrom(
            agent_pb2.InterfaceMetrics(
                interface_name=reading.interface,
                rx_bytes=counters["rx_bytes"],
                tx_bytes=counters["tx_bytes"],
                rx_packets=counters["rx_packets"],
                tx_packets=counters["tx_packets"],
                rx_drops=counters["rx_dropped"],
                tx_drops=counters["tx_dropped"],
            )
        )
    return metrics


def _termination(notice: SpotNotice) -> agent_pb2.TerminationNotice:
    deadline = None if notice.deadline_ns is None else timestamp(notice.deadline_ns)
    return agent_pb2.TerminationNotice(action=notice.action, deadline=deadline)
