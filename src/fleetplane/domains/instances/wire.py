"""Protobuf to kinds and back, for both generations of agents and operators. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.instances.configuration.hashes import group_etag
from fleetplane.domains.instances.configuration.merge import EffectiveGroup
from fleetplane.domains.instances.configuration.templates import template as templates
from fleetplane.domains.instances.configuration.templates.functions import TemplateInvalid
from fleetplane.domains.instances.kinds import GroupOverride, HealthReport, Instance, tenant_of
from fleetplane.domains.instances.live.errors import Trouble
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.gen.fleetplane.instances.v1 import early_pb2
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.timestamps import timestamp

LAST_FIELD_OF_SECOND_GENERATION = 9
FILES_LIMIT = 256  # in one report; a template has a handful
CERTIFICATE_SUFFIX = ".crt"
"""Of every file that agents take for a certificate."""
TEXT_LIMIT_BYTES = 1024
REPORT_LIMIT_BYTES = 64 * 1024
"""Of one report, which is stored where servers share a database: of 256 files there are 100 bytes each."""
COUNT_LIMIT = 2**63 - 1
"""Of whatever is counted, in nanoseconds too: the year 2262."""
GROUP_SIZE_LIMIT = 100_000
"""Ten times what one server was tried with; a slip of the finger must not ask for two billion machines."""
VARS_LIMIT = 256
VAR_LIMIT_BYTES = 16 * 1024


class EventGeneration(StrEnum):
    """Which numbers `GroupEvent.type` has. The same number means opposite things to the two."""

    FIRST = "first"
    SECOND = "second"


_UPSERT = {EventGeneration.FIRST: 0, EventGeneration.SECOND: 1}
_DELETE = {EventGeneration.FIRST: 1, EventGeneration.SECOND: 2}


# Health reports.


def health_report(body: bytes) -> HealthReport:
    """A report of either generation, told apart by the field numbers that occur in it.

    Whatever is taken can be stored: it is written in one transaction with the reports of other tenants.
    """
    if len(body) > REPORT_LIMIT_BYTES:
        raise InvalidArgument(f"a health report takes {len(body)} bytes, more than {REPORT_LIMIT_BYTES}")
    try:
        if max(_field_numbers(body), default=0) > LAST_FIELD_OF_SECOND_GENERATION:
            return _early_report(early_pb2.EarlyHealthReport.FromString(body))
        return _report(agent_pb2.HealthReportRequest.FromString(body))
    except (DecodeError, ValueError) as error:
        raise InvalidArgument("the health report cannot be read") from error


def _report(message: agent_pb2.HealthReportRequest) -> HealthReport:
    metrics = message.metrics
    return HealthReport(
        instance=message.instance_id,
        version=message.version[:TEXT_LIMIT_BYTES],
        count=message.count,
        config_hash=message.config_hash,
        files=_files(message.files.items()),
        issued=_issued(message.files.items()),
        termination_action=_notice(message)[0],
        termination_deadline_ns=_notice(message)[1],
        cpu_usage=metrics.cpu_usage if metrics.HasField("cpu_usage") else None,
        memory_usage=metrics.memory_usage if metrics.HasField("memory_usage") else None,
        conntrack_percent=_conntrack(metrics),
        dropped_packets=_dropped(metrics),
        received_bytes=_counted(metrics, metrics.network_interface.rx_bytes),
        sent_bytes=_counted(metrics, metrics.network_interface.tx_bytes),
        connections=dict(metrics.ebpf_counters),
    )


def _conntrack(metrics: agent_pb2.Metrics) -> float | None:
    if not metrics.HasField("conntrack_count") or not metrics.conntrack_max:
        return None
    return 100.0 * metrics.conntrack_count / metrics.conntrack_max


def _dropped(metrics: agent_pb2.Metrics) -> int | None:
    return _counted(metrics, metrics.network_interface.rx_drops + metrics.network_interface.tx_drops)


def _counted(metrics: agent_pb2.Metrics, count: int) -> int | None:
    """A count of the interface that the agent watches, if it watches one."""
    return min(count, COUNT_LIMIT) if metrics.HasField("network_interface") else None


def _early_report(message: early_pb2.EarlyHealthReport) -> HealthReport:
    return HealthReport(
        instance=message.instance_id,
        version=message.version[:TEXT_LIMIT_BYTES],
        count=message.count,
        config_hash=message.config_hash,
        files=_files(message.files.items()),
        issued=_issued(message.files.items()),
        termination_action=_notice(message)[0],
        termination_deadline_ns=_notice(message)[1],
        cpu_usage=message.one_minute.cpu_usage if message.HasField("one_minute") else None,
        memory_usage=message.one_minute.memory_usage if message.HasField("one_minute") else None,
    )


def _files(entries: Iterable[tuple[str, agent_pb2.FileStatus]]) -> dict[str, str]:
    files: dict[str, str] = {}
    for name, status in entries:
        if len(files) >= FILES_LIMIT:
            raise InvalidArgument(f"files has more than {FILES_LIMIT} entries", field="files")
        files[name] = (status.error or "unknown error")[:TEXT_LIMIT_BYTES] if status.HasField("error") else ""
    return files


def _issued(entries: Iterable[tuple[str, agent_pb2.FileStatus]]) -> dict[str, int]:
    return {
        name: _moment_ns(status.last_modified, field="files.last_modified")
        for name, status in entries
        if name.endswith(CERTIFICATE_SUFFIX) and status.HasField("last_modified")
    }


def _notice(
    message: agent_pb2.HealthReportRequest | early_pb2.EarlyHealthReport,
) -> tuple[str, int | None]:
    if not message.HasField("termination_notice"):
        return "", None
    notice = message.termination_notice
    deadline = None
    if notice.HasField("deadline"):
        deadline = _moment_ns(notice.deadline, field="termination_notice.deadline")
    return notice.action or "terminate", deadline


def _moment_ns(said: Timestamp, *, field: str) -> int:
    found = said.ToNanoseconds()
    if abs(found) > COUNT_LIMIT:
        raise InvalidArgument("the time is too far away", field=field)
    return found


def _field_numbers(body: bytes) -> set[int]:
    """The top-level field numbers of an encoded message."""
    numbers, at = set(), 0
    while at < len(body):
        tag, at = _varint(body, at)
        numbers.add(tag >> 3)
        match tag & 7:
            case 0:
                _, at = _varint(body, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(body, at)
                at += length
            case 5:
                at += 4
            case _:
                raise ValueError("group or unknown wire type")
    if at > len(body):
        raise ValueError("truncated")
    return numbers


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(body) or shift > 63:
            raise ValueError("truncated or overlong number")
        byte = body[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


# What operators see of instances.


def instance_status(instance: Instance, last_seen_ns: int | None) -> operator_pb2.InstanceStatusResponse:
    status = instance.status
    assert status is not None
    return operator_pb2.InstanceStatusResponse(
        instance_id=instance.name,
        tenant=tenant_of(instance),
        status=status_word(instance),
        created_at=timestamp(instance.created_at_ns),
        last_seen=timestamp(last_seen_ns),
        provider_instance_id=status.provider_id,
    )


def status_word(instance: Instance) -> str:
    """The provider's word while the instance lives, ours once it goes."""
    status = instance.status
    match rules.state(instance):
        case rules.State.DELETED:
            return "deleted"
        case rules.State.DELETING:
            return "deleting"
        case rules.State.PENDING:
            return "pending"
    assert status is not None
    return status.provider_status or "running"


def instance_event(instance: Instance, word: str) -> operator_pb2.InstanceEvent:
    status = instance.status
    assert status is not None
    drain = status.drain
    return operator_pb2.InstanceEvent(
        instance_id=instance.name,
        tenant=tenant_of(instance),
        provider_instance_id=status.provider_id,
        group=instance.spec.group,
        status=word,
        reason=drain.reason if drain is not None else "",
        unhealthy_at=timestamp(status.unhealthy_since_ns or (drain.started_at_ns if drain else None)),
        delete_at=timestamp(drain.delete_at_ns if drain is not None else None),
    )


def event_word(instance: Instance) -> str | None:
    """Which step of its end an instance has reached; None while it has reached none."""
    match rules.state(instance):
        case rules.State.DRAINING:
            return "pending_deletion"
        case rules.State.DELETING:
            return "deleting"
        case rules.State.DELETED:
            return "deleted"
    return None


# What operators see and say of groups.


def group_override(config: operator_pb2.GroupConfig) -> GroupOverride:
    """What an operator wants of a group. The size is always meant, zero included; `args` never were."""
    return GroupOverride(
        template=config.template,
        size=group_size(config.size, "config.size"),
        instance_type=bounded(config.instance_type, "config.instance_type"),
        subnet_pool=config.subnet_pool,
        vars=variables(config.vars),
    )


def group_size(size: int, field: str) -> int:
    if not 0 <= size <= GROUP_SIZE_LIMIT:
        raise InvalidArgument(f"size must be between 0 and {GROUP_SIZE_LIMIT}", field=field)
    return size


def variables(given: Mapping[str, str], *, field: str = "config.vars") -> dict[str, str]:
    return _entries(given, "vars", "variable", field)


def arguments(given: Mapping[str, str]) -> dict[str, str]:
    """Arguments for the provider. They may be templates, which must be right before they are kept."""
    for name, value in given.items():
        try:
            templates.compile(value)
        except TemplateInvalid as error:
            raise InvalidArgument(f"the argument {name[:64]!r}: {error}", field="args") from error
    return _entries(given, "args", "argument", "args")


def _entries(given: Mapping[str, str], name: str, word: str, field: str) -> dict[str, str]:
    if len(given) > VARS_LIMIT:
        raise InvalidArgument(f"{name} has more than {VARS_LIMIT} entries", field=field)
    for key, value in given.items():
        if not key:
            raise InvalidArgument(f"{name} has an entry without a name", field=field)
        if len(key) + len(value) > VAR_LIMIT_BYTES:
            raise InvalidArgument(f"the {word} {key[:64]!r} is longer than {VAR_LIMIT_BYTES}", field=field)
    return dict(given)


def bounded(text: str, field: str) -> str:
    if len(text) > TEXT_LIMIT_BYTES:
        raise InvalidArgument(f"{field} is longer than {TEXT_LIMIT_BYTES} characters", field=field)
    return text


def group_status(group: EffectiveGroup, members: Iterable[Instance]) -> operator_pb2.GroupStatus:
    """A group and those of its instances that are there for its size: what the provider has made."""
    present = (member.status for member in members if _counts(member))
    providers = [status.provider_id for status in present if status is not None and status.provider_id]
    return operator_pb2.GroupStatus(
        key=group.key,
        tenant=group.tenant,
        template=group.template,
        size=group.size,
        instance_type=group.stated.instance_type,
        subnet_pool=group.stated.subnet_pool,
        vars=group.stated.vars,
        is_static=group.is_static,
        etag=group_etag(group),
        actual_size=len(providers),
        provider_ids=sorted(providers),
    )


def _counts(instance: Instance) -> bool:
    going = (rules.State.DELETING, rules.State.DELETED)
    return not instance.spec.on_demand and rules.state(instance) not in going


def group_upserted(status: operator_pb2.GroupStatus, generation: EventGeneration) -> operator_pb2.GroupEvent:
    return operator_pb2.GroupEvent(type=_UPSERT[generation], group=status)  # type: ignore[arg-type]


def group_deleted(tenant: str, key: str, generation: EventGeneration) -> operator_pb2.GroupEvent:
    group = operator_pb2.GroupStatus(key=key, tenant=tenant)
    return operator_pb2.GroupEvent(type=_DELETE[generation], group=group)  # type: ignore[arg-type]


def error_event(trouble: Trouble) -> operator_pb2.ErrorEvent:
    return operator_pb2.ErrorEvent(
        group=trouble.group,
        instance_id=trouble.instance,
        error=trouble.text,
        timestamp=timestamp(trouble.at_ns),
    )
