"""Measurements in both families of messages: flat with detail, and nested. Pure."""

from __future__ import annotations

from fleetplane.domains.boards.agent.metrics.values import Power, Snapshot
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.pi_agent import pi_agent_pb2 as pi
from fleetplane.kernel.values.timestamps import timestamp


def flat(snapshot: Snapshot, *, detail: bool = True) -> pb.SystemMetrics:
    message = pb.SystemMetrics(
        cpu_usage=snapshot.cpu_usage_percent,
        memory_usage=snapshot.memory_usage_percent,
        temperature=snapshot.temperature_celsius,
        disk_usage=snapshot.root_disk_usage_percent,
        interfaces=[
            pb.NetworkInterface(
                name=one.name,
                bytes_sent=one.bytes_sent,
                bytes_recv=one.bytes_recv,
                packets_sent=one.packets_sent,
                packets_recv=one.packets_recv,
                err_in=one.err_in,
                err_out=one.err_out,
                drop_in=one.drop_in,
                drop_out=one.drop_out,
                addresses=one.addresses,
                mac_address=one.mac_address,
                up=one.up,
                mtu=one.mtu,
            )
            for one in snapshot.interfaces
        ],
        timestamp=timestamp(snapshot.at_ns),
        uptime_seconds=snapshot.uptime_seconds,
        unavailable=snapshot.unavailable,
    )
    if detail:
        message.detail.CopyFrom(nested(snapshot))
    if snapshot.power is not None:
        message.power.CopyFrom(_power(snapshot.power))
    return message


def nested(snapshot: Snapshot) -> pi.SystemMetrics:
    message = pi.SystemMetrics(
        disks=[
            pi.DiskMetrics(
                device=one.device,
                mountpoint=one.mountpoint,
                filesystem=one.filesystem,
                total_bytes=one.total_bytes,
                used_bytes=one.used_bytes,
                free_bytes=one.free_bytes,
                usage_percent=one.usage_percent,
                inodes_total=one.inodes_total,
                inodes_used=one.inodes_used,
                inodes_free=one.inodes_free,
                inodes_usage_percent=one.inodes_usage_percent,
            )
            for one in snapshot.disks
        ],
        network=[
            pi.NetworkMetrics(
                interface=one.name,
                bytes_sent=one.bytes_sent,
                bytes_recv=one.bytes_recv,
                packets_sent=one.packets_sent,
                packets_recv=one.packets_recv,
                err_in=one.err_in,
                err_out=one.err_out,
                drop_in=one.drop_in,
                drop_out=one.drop_out,
            )
            for one in snapshot.interfaces
        ],
    )
    if snapshot.zones:
        message.thermal.CopyFrom(_thermal(snapshot))
    _add_processors(message, snapshot)
    _add_memory(message, snapshot)
    return message


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


def _add_processors(message: pi.SystemMetrics, snapshot: Snapshot) -> None:
    """A group that could not be read stays unset."""
    cpu, load, processes = snapshot.cpu, snapshot.load, snapshot.processes
    if cpu is not None:
        message.cpu.CopyFrom(
            pi.CPUMetrics(
                usage_percent=cpu.usage_percent,
                per_core_usage=cpu.per_core_percent,
                user_percent=cpu.user_percent,
                system_percent=cpu.system_percent,
                idle_percent=cpu.idle_percent,
                iowait_percent=cpu.iowait_percent,
            )
        )
    if load is not None:
        message.load.CopyFrom(pi.LoadMetrics(load1=load.load1, load5=load.load5, load15=load.load15))
    if processes is not None:
        message.processes.CopyFrom(
            pi.ProcessMetrics(
                total=processes.total,
                running=processes.running,
                sleeping=processes.sleeping,
                stopped=processes.stopped,
                zombie=processes.zombie,
            )
        )


def _add_memory(message: pi.SystemMetrics, snapshot: Snapshot) -> None:
    memory = snapshot.memory
    if memory is not None:
        message.memory.CopyFrom(
            pi.MemoryMetrics(
                total_bytes=memory.total_bytes,
                available_bytes=memory.available_bytes,
                used_bytes=memory.used_bytes,
                free_bytes=memory.free_bytes,
                cached_bytes=memory.cached_bytes,
                buffers_bytes=memory.buffers_bytes,
                usage_percent=memory.usage_percent,
                swap_total_bytes=memory.swap_total_bytes,
                swap_used_bytes=memory.swap_used_bytes,
                swap_usage_percent=memory.swap_usage_percent,
            )
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


def _power(power: Power) -> pb.PowerStatus:
    return pb.PowerStatus(
        under_voltage_now=power.under_voltage_now,
        frequency_capped_now=power.frequency_capped_now,
        throttled_now=power.throttled_now,
        soft_temp_limit_now=power.soft_temp_limit_now,
        under_voltage_seen=power.under_voltage_seen,
        frequency_capped_seen=power.frequency_capped_seen,
        throttled_seen=power.throttled_seen,
        soft_temp_limit_seen=power.soft_temp_limit_seen,
        raw=power.raw,
    )
