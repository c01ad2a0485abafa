"""The shapes of what boards measure, and of the certificate authority's answers.

Most are messages of gRPC, spelled as JSON. The order of fields is the order on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType, field

from fleetplane.domains.boards.rest.common import BoardShape, Data
from fleetplane.web.rest.bodies import Number


class ShownAuthority(BoardShape, frozen=True, kw_only=True):
    id: int
    name: str
    type: str
    backend: str
    status: str
    subject: str
    serial_number: str
    not_before: str | None
    not_after: str | None
    certificates_issued: int
    certificates_active: int
    created_at: str | None
    updated_at: str | None


class InitializedAuthority(BoardShape, frozen=True, kw_only=True):
    success: bool
    message: str
    ca_info: ShownAuthority | None


class AuthorityCertificate(BoardShape, frozen=True, kw_only=True):
    certificate_pem: str
    serial_number: str
    not_before: str | None
    not_after: str | None


class CertificateCounts(BoardShape, frozen=True, kw_only=True):
    total_certificates: int
    active_certificates: int
    expired_certificates: int
    revoked_certificates: int
    certificates_issued_24h: int
    certificates_expiring_30d: int
    ca_info: ShownAuthority | None


class CleanedCertificates(BoardShape, frozen=True, kw_only=True):
    success: bool
    cleaned_count: int
    message: str


class CertificateFields(BoardShape, frozen=True, kw_only=True):
    id: int
    serial_number: str
    common_name: str
    type: str
    status: str
    subject: str
    issuer: str
    not_before: str | None
    not_after: str | None
    sans: str
    """As clients know it: names by kind as JSON in a string, empty if there are none."""
    key_usage: str
    """Separated by commas."""
    ext_key_usage: str
    backend: str
    node_id: int | None
    cluster_id: int | None
    auto_renew: bool
    revoked_at: str | None
    revoked_reason: str | None
    created_at: str | None
    updated_at: str | None


class ShownCertificate(CertificateFields, frozen=True, kw_only=True):
    certificate_pem: str


class CertificateRows(BoardShape, frozen=True, kw_only=True):
    """Certificates that were issued."""

    data: Sequence[ShownCertificate] = field(name="certificates")
    count: int
    total: int
    limit: int
    offset: int


class RevokedCertificate(BoardShape, frozen=True, kw_only=True):
    message: str
    certificate: ShownCertificate


class CheckedCertificate(BoardShape, frozen=True, kw_only=True):
    valid: bool
    expired: bool
    revoked: bool
    not_before: str | None
    not_after: str | None
    serial_number: str
    subject: str
    issuer: str
    errors: Sequence[str]


class ShownRequest(BoardShape, frozen=True, kw_only=True):
    id: int
    common_name: str
    type: str
    status: str
    sans: str
    """As clients know it: an array as JSON in a string, empty if there are none."""
    validity_period: str
    key_usage: str
    """In brackets, separated by commas; empty if none was asked for."""
    ext_key_usage: str
    node_id: int | None
    cluster_id: int | None
    processed_at: str | None
    certificate_id: int | None
    failure_reason: str | None
    created_at: str | None
    updated_at: str | None


class DecidedRequest(ShownRequest, frozen=True, kw_only=True):
    certificate: ShownCertificate | None


class RequestRows(BoardShape, frozen=True, kw_only=True):
    """Requests for certificates."""

    data: Sequence[ShownRequest] = field(name="requests")
    count: int
    total: int
    limit: int
    offset: int


class CpuReading(BoardShape, frozen=True, kw_only=True):
    usage_percent: Number
    per_core_usage: Sequence[Number]
    user_percent: Number
    system_percent: Number
    idle_percent: Number
    iowait_percent: Number


class MemoryReading(BoardShape, frozen=True, kw_only=True):
    total_bytes: int
    available_bytes: int
    used_bytes: int
    free_bytes: int
    cached_bytes: int
    buffers_bytes: int
    usage_percent: Number
    swap_total_bytes: int
    swap_used_bytes: int
    swap_usage_percent: Number


class DiskReading(BoardShape, frozen=True, kw_only=True):
    device: str
    mountpoint: str
    filesystem: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    usage_percent: Number
    inodes_total: int
    inodes_used: int
    inodes_free: int
    inodes_usage_percent: Number


class NetworkReading(BoardShape, frozen=True, kw_only=True):
    interface: str
    bytes_sent: int
    bytes_recv: int
    packets_sent: int
    packets_recv: int
    err_in: int
    err_out: int
    drop_in: int
    drop_out: int


class ThermalZone(BoardShape, frozen=True, kw_only=True):
    name: str
    temperature_celsius: Number
    critical_temp: Number
    status: str


class ThermalReading(BoardShape, frozen=True, kw_only=True):
    zones: Sequence[ThermalZone]


class LoadReading(BoardShape, frozen=True, kw_only=True):
    load1: Number
    load5: Number
    load15: Number


class ProcessReading(BoardShape, frozen=True, kw_only=True):
    total: int
    running: int
    sleeping: int
    stopped: int
    zombie: int


class PowerReading(BoardShape, frozen=True, kw_only=True):
    """What the firmware says of power and heat: now, and since boot."""

    under_voltage_now: bool
    frequency_capped_now: bool
    throttled_now: bool
    soft_temp_limit_now: bool
    under_voltage_seen: bool
    frequency_capped_seen: bool
    throttled_seen: bool
    soft_temp_limit_seen: bool
    raw: int


class MeasuredGroups(BoardShape, frozen=True, kw_only=True):
    """What every agent measures; a group that was not measured is null."""

    cpu: CpuReading | None
    memory: MemoryReading | None
    disks: Sequence[DiskReading]
    network: Sequence[NetworkReading]
    thermal: ThermalReading | None
    load: LoadReading | None
    processes: ProcessReading | None
    cpu_usage: Number | UnsetType = UNSET
    memory_usage: Number | UnsetType = UNSET
    temperature: Number | UnsetType = UNSET
    disk_usage: Number | UnsetType = UNSET


class SystemReading(MeasuredGroups, frozen=True, kw_only=True):
    """What a board measures this moment. Agents of the first generation say nothing about `power`,
    `uptime_seconds` and `unavailable`."""

    timestamp: str | None
    power: PowerReading | UnsetType | None = UNSET
    uptime_seconds: int | UnsetType = UNSET
    unavailable: Sequence[str] | UnsetType = UNSET
    node_id: int
    hostname: str


class OriginalReading(MeasuredGroups, frozen=True, kw_only=True):
    """A reading of a first-generation agent, with its fields in the order that clients know."""

    node_id: int
    hostname: str
    timestamp: str


class SystemData(Data[SystemReading], frozen=True, kw_only=True):
    """What a board measures this moment."""


class OriginalData(Data[OriginalReading], frozen=True, kw_only=True):
    """What a board with an agent of the first generation measures this moment."""


class CheckResult(BoardShape, frozen=True, kw_only=True):
    name: str
    status: str
    message: str
    timestamp: str | None


class AgentHealth(BoardShape, frozen=True, kw_only=True):
    status: str
    timestamp: str | None
    version: str
    uptime: str
    gpio_available: bool
    capabilities: Sequence[str]
    checks: Sequence[CheckResult]
    node_id: int


class AgentHealthData(Data[AgentHealth], frozen=True, kw_only=True):
    """The health that a board's agent reports."""


# Over time.


class LatestValue(BoardShape, frozen=True, kw_only=True):
    value: Number
    timestamp: str


class LatestValues(BoardShape, frozen=True, kw_only=True):
    """By series; one that was not measured lately is absent."""

    cpu_usage: LatestValue | UnsetType = UNSET
    memory_usage: LatestValue | UnsetType = UNSET
    temperature: LatestValue | UnsetType = UNSET
    disk_usage: LatestValue | UnsetType = UNSET


class SeriesPoint(BoardShape, frozen=True, kw_only=True):
    timestamp: str
    average: float
    min: float
    max: float
    count: int


class NodeMetrics(BoardShape, frozen=True, kw_only=True):
    """`data` if no series was asked for, else the rest."""

    node_id: int
    data: LatestValues | UnsetType = UNSET
    series: str | UnsetType = UNSET
    step_seconds: float | UnsetType = UNSET
    points: Sequence[SeriesPoint] | UnsetType = UNSET
    count: int | UnsetType = UNSET


class NodeLatest(BoardShape, frozen=True, kw_only=True):
    """The latest values of one board."""

    node_id: int
    cpu_usage: LatestValue | UnsetType = UNSET
    memory_usage: LatestValue | UnsetType = UNSET
    temperature: LatestValue | UnsetType = UNSET
    disk_usage: LatestValue | UnsetType = UNSET


class FleetMetrics(BoardShape, frozen=True, kw_only=True):
    data: Sequence[NodeLatest]
    series: Sequence[str]
    total: int
    limit: int
    offset: int
