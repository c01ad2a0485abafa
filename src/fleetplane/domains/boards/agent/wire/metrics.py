"""Measurements in both families of messages: flat with detail, and nested. Pure."""

from __future__ import annotations

from fleetplane.domains.boards.agent.metrics.values import Snapshot
from fleetplane.domains.boards.wire.message_json import filled
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.kernel.values.timestamps import timestamp


def flat(snapshot: Snapshot, *, detail: bool = True) -> pb.SystemMetrics:
    return filled(
        pb.SystemMetrics,
        snapshot,
        cpu_usage=snapshot.cpu_usage_percent,
        memory_usage=snapshot.memory_usage_percent,
        temperature=snapshot.temperature_celsius,
        disk_usage=snapshot.root_disk_usage_percent,
        interfaces=[filled(pb.NetworkInterface, one) for one in snapshot.interfaces],
        timestamp=timestamp(snapshot.at_ns),
        detail=nested(snapshot) if detail else None,
        power=filled(pb.PowerStatus, snapshot.power) if snapshot.power is not None else None,
    )


def nested(snapshot: Snapshot) -> pi.SystemMetrics:
    """A group that could not be read stays unset."""
    cpu, memory = snapshot.cpu, snapshot.memory
    load, processes = snapshot.load, snapshot.processes
    return pi.SystemMetrics(
        cpu=filled(pi.CPUMetrics, cpu, per_core_usage=cpu.per_core_percent) if cpu is not None else None,
        memory=filled(pi.MemoryMetrics, memory) if memory is not None else None,
        disks=[filled(pi.DiskMetrics, one) for one in snapshot.disks],
        network=[filled(pi.NetworkMetrics, one, interface=one.name) for one in snapshot.interfaces],
        thermal=_thermal(snapshot) if snapshot.zones else None,
        load=filled(pi.LoadMetrics, load) if load is not None else None,
        processes=filled(pi.ProcessMetrics, processes) if processes is not None else None,
    )


def _thermal(snapshot: Snapshot) -> pi.ThermalMetrics:
    return pi.ThermalMetrics(
        zones=[
            pi.ThermalZone(
                name=zone.name,
                temperature_celsius=zone.celsius,
                critical_temp=zone.critical_celsius or 0.0,
                status=zone.status,
            )
            for zone in snapshot.zones
        ]
    )


def system_info(snapshot: Snapshot, *, now_ns: int) -> pi.GetSystemInfoResponse:
    board, memory, load = snapshot.board, snapshot.memory, snapshot.load
    return pi.GetSystemInfoResponse(
        hostname=board.hostname,
        platform="linux",
        architecture=board.architecture,
        cpu_cores=board.cpu_cores,
        memory_total=memory.total_bytes if memory else 0,
        memory_available=memory.available_bytes if memory else 0,
        kernel_version=board.kernel_version,
        load_average_1m=load.load1 if load else 0.0,
        load_average_5m=load.load5 if load else 0.0,
        load_average_15m=load.load15 if load else 0.0,
        timestamp=timestamp(now_ns),
    )
