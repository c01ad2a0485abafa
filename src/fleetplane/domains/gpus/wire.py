"""Protobuf to kinds and back, for every dialect of the device API. Pure.

Six dialects share one store. Their answers differ in where a GPU keeps its name and version:

| dialect  | Gpu                                                   | GpuList            |
|----------|-------------------------------------------------------|--------------------|
| superset | metadata{name, version}, spec, status, version, name  | metadata, items=2  |
| meta     | metadata{name}, spec, status, version                 | items=2            |
| name     | name=1, spec, status, version                         | items=1            |
| first    | name=1, spec, status                                  | items=1            |
| later    | metadata{name, version, namespace, uid, ...}, spec, status | metadata, items=2 |

`superset` is what the original's generated clients read, plus the name where JSON readers
look for it. `meta` is byte for byte what the original sends. `first`, `later` and `typed` are generations of
the package `nvidia.nvsentinel.v1alpha1`; see `generations`. A wrong dialect does not fail, it yields
garbage, so the choice is always explicit: by request metadata, by listener setting, by package, or by
what a request carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from fleetplane.domains.gpus.kinds import Gpu, Replacement, StatusReport
from fleetplane.gen.fleetplane.device.v1alpha1 import named_pb2, typed_pb2
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, provider_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.resources import Condition
from fleetplane.kernel.values.times import NS

DIALECT_HEADER = "x-device-api-dialect"
DIALECT_FIELD = DIALECT_HEADER.encode()

# Bounds on what a provider may say. Names and UUIDs are 40 characters in practice; the three
# condition bounds are those of the Kubernetes condition type, which this API follows.
MAX_NAME_BYTES = 512
MAX_UUID_BYTES = 256
MAX_PROVIDER_BYTES = 256
MAX_TYPE_BYTES = 316
MAX_STATUS_BYTES = 64
MAX_REASON_BYTES = 1024
MAX_MESSAGE_BYTES = 32_768
MAX_ACTION_BYTES = 1024
MAX_CONDITIONS = 128  # in one reported status
MAX_REPORT_BYTES = 65_536  # of one reported status; as many as conditions may grow to one by one
MAX_HEARTBEAT_NAMES = 4096

NAMESPACE = "default"
"""Where every GPU of a node lies, for clients that name a namespace; to others GPUs have none."""
GPU_KIND, GPU_API_VERSION = "GPU", "device.nvidia.com/v1alpha1"
INITIAL_EVENTS_END = "k8s.io/initial-events-end"
"""The annotation of the bookmark after the initial events of a watch."""
CONTINUE_FIELD = 1000
"""Of `ListMeta`: what to ask the next page with."""

_MIN_SECONDS, _MAX_SECONDS = -(2**63) // NS + 1, 2**63 // NS - 1


class GpuDialect(StrEnum):
    SUPERSET = "superset"
    META = "meta"
    NAME = "name"
    FIRST = "first"
    LATER = "later"
    LATER_NAMESPACED = "later-namespaced"
    """`later`, to a client that named the namespace."""
    TYPED = "typed"


SELECTABLE = (GpuDialect.SUPERSET, GpuDialect.META, GpuDialect.NAME)
"""What a caller or a listener may ask for; the others are chosen within their package."""

VERSIONED_LISTS = frozenset(
    {GpuDialect.SUPERSET, GpuDialect.LATER, GpuDialect.LATER_NAMESPACED, GpuDialect.TYPED}
)
ITEMS_FIELD = {GpuDialect.NAME: 1, GpuDialect.FIRST: 1, GpuDialect.TYPED: 3}
"""Of `GpuList`, where it is not 2; the list's metadata stands before."""


def dialect(text: str) -> GpuDialect:
    if text in SELECTABLE:
        return GpuDialect(text)
    raise InvalidArgument(
        f"unknown dialect {text!r}; known are {', '.join(SELECTABLE)}", field=DIALECT_HEADER
    )


# From the wire.


def _bounded(value: str, field: str, limit_bytes: int) -> str:
    # A character takes at most four bytes, so most values need not be encoded to be measured.
    if len(value) > limit_bytes // 4 and len(value.encode()) > limit_bytes:
        raise InvalidArgument(f"{field} is longer than {limit_bytes} bytes", field=field)
    return value


def gpu_name(value: str) -> str:
    if not value:
        raise InvalidArgument("name is required", field="name")
    if "\0" in value:
        raise InvalidArgument("name must not contain a NUL character", field="name")
    return _bounded(value, "name", MAX_NAME_BYTES)


def requested_name(request: bytes) -> str:
    """The name in an encoded `GetGpuRequest` of any dialect; empty if there is none."""
    try:
        return gpu_pb2.GetGpuRequest.FromString(request).name
    except DecodeError:
        return ""


def provider_id(value: str) -> str:
    if "\0" in value:
        raise InvalidArgument("provider_id must not contain a NUL character", field="provider_id")
    return _bounded(value, "provider_id", MAX_PROVIDER_BYTES)


def required_provider_id(value: str) -> str:
    if not value:
        raise InvalidArgument("provider_id is required", field="provider_id")
    return provider_id(value)


def heartbeat_names(request_names: Sequence[str]) -> frozenset[str]:
    if len(request_names) > MAX_HEARTBEAT_NAMES:
        raise InvalidArgument(f"gpu_names has more than {MAX_HEARTBEAT_NAMES} entries", field="gpu_names")
    return frozenset(request_names)


def uuid(spec: gpu_pb2.GpuSpec) -> str:
    return _bounded(spec.uuid, "spec.uuid", MAX_UUID_BYTES)


def parent(spec: gpu_pb2.GpuSpec) -> str:
    if "\0" in spec.parent:
        raise InvalidArgument("parent must not contain a NUL character", field="spec.parent")
    return _bounded(spec.parent, "spec.parent", MAX_NAME_BYTES)


def resource_version(text: str) -> int | None:
    """The version to resume after, or None for a fresh start."""
    return None if text in ("", "0") else written_version(text, "opts.resource_version")


def condition(message: gpu_pb2.Condition, *, writer: str, field: str = "condition") -> Condition:
    return Condition(
        type=_bounded(message.type, f"{field}.type", MAX_TYPE_BYTES),
        status=_bounded(message.status, f"{field}.status", MAX_STATUS_BYTES),
        reason=_bounded(message.reason, f"{field}.reason", MAX_REASON_BYTES),
        message=_bounded(message.message, f"{field}.message", MAX_MESSAGE_BYTES),
        changed_at_ns=(
            _nanoseconds(message.last_transition_time, f"{field}.last_transition_time")
            if message.HasField("last_transition_time")
            else None
        ),
        writer=writer,
    )


def required_condition(request: provider_pb2.UpdateGpuConditionRequest, *, writer: str) -> Condition:
    if not request.HasField("condition"):
        raise InvalidArgument("condition is required", field="condition")
    if not request.condition.type:
        raise InvalidArgument("condition type is required", field="condition.type")
    return condition(request.condition, writer=writer)


def action(request: provider_pb2.UpdateGpuConditionRequest) -> str | None:
    """What is recommended beside a condition; None if the request does not say."""
    if not request.HasField("recommended_action"):
        return None
    return _bounded(request.recommended_action, "recommended_action", MAX_ACTION_BYTES)


def report(message: gpu_pb2.GpuStatus, *, writer: str, field: str = "status") -> StatusReport:
    if len(message.conditions) > MAX_CONDITIONS:
        raise InvalidArgument(
            f"{field}.conditions has more than {MAX_CONDITIONS} entries", field=f"{field}.conditions"
        )
    if message.ByteSize() > MAX_REPORT_BYTES:
        raise InvalidArgument(f"{field} is larger than {MAX_REPORT_BYTES} bytes", field=field)
    return StatusReport(
        conditions=tuple(
            condition(entry, writer=writer, field=f"{field}.conditions[{index}]")
            for index, entry in enumerate(message.conditions)
        ),
        recommended_action=_bounded(
            message.recommended_action, f"{field}.recommended_action", MAX_ACTION_BYTES
        ),
    )


def asked_gpu(message: gpu_pb2.Gpu) -> tuple[str, Replacement]:
    """Name and content of a GPU as a client of the writing generations sends it."""
    meta = message.metadata
    if not meta.name:
        raise InvalidArgument("gpu.metadata.name is required", field="gpu.metadata.name")
    if meta.namespace not in ("", NAMESPACE):
        raise InvalidArgument(
            f"namespace {meta.namespace[:64]!r}: every GPU is in {NAMESPACE}", field="gpu.metadata.namespace"
        )
    version = meta.resource_version or str(message.resource_version or "")
    return gpu_name(meta.name), Replacement(
        uid=meta.uid,
        version=written_version(version, "gpu.metadata.resource_version"),
        uuid=uuid(message.spec) if message.HasField("spec") else None,
        report=report(message.status, writer="", field="gpu.status") if message.HasField("status") else None,
    )


def written_version(text: str, field: str) -> int | None:
    """The version that a write is meant for; None if it is meant for any."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidArgument(f'invalid resource_version "{text[:40]}": must be numeric', field=field)
    return int(text)


def untyped(gpu: typed_pb2.TypedGpu) -> gpu_pb2.Gpu:
    """The GPU of a typed write in the numbers of the generation before."""
    meta = gpu.object_meta
    for field in ("labels", "annotations"):
        if getattr(meta, field):
            raise InvalidArgument(
                "GPUs have no labels and annotations here; send none", field=f"gpu.object_meta.{field}"
            )
    message = gpu_pb2.Gpu(
        metadata=gpu_pb2.ObjectMeta(
            name=meta.name, resource_version=meta.resource_version, namespace=meta.namespace, uid=meta.uid
        )
    )
    if gpu.HasField("spec"):
        message.spec.SetInParent()
        message.spec.uuid = gpu.spec.uuid
    if gpu.HasField("status"):
        message.status.SetInParent()
        message.status.recommended_action = gpu.status.recommended_action
        for said in gpu.status.conditions:
            entry = message.status.conditions.add(
                type=said.type, status=said.status, reason=said.reason, message=said.message
            )
            if said.HasField("last_transition_time"):
                entry.last_transition_time.CopyFrom(said.last_transition_time)
    return message


def required_report(request: gpu_pb2.ReplaceGpuStatusRequest) -> StatusReport:
    if not request.HasField("status"):
        raise InvalidArgument("status is required", field="status")
    return report(request.status, writer="")


def _nanoseconds(timestamp: Timestamp, field: str) -> int:
    if not (_MIN_SECONDS < timestamp.seconds < _MAX_SECONDS and 0 <= timestamp.nanos < NS):
        raise InvalidArgument(f"{field} is out of range", field=field)
    return timestamp.seconds * NS + timestamp.nanos


# To the wire.

AnyGpu = gpu_pb2.Gpu | named_pb2.NamedGpu | first_pb2.Gpu | typed_pb2.TypedGpu


def encode_gpu(gpu: Gpu, dialect: GpuDialect) -> bytes:
    """The `Gpu` message of one dialect."""
    message: AnyGpu
    match dialect:
        case GpuDialect.SUPERSET:
            message = gpu_pb2.Gpu(
                metadata=gpu_pb2.ObjectMeta(name=gpu.name, resource_version=str(gpu.revision)),
                resource_version=gpu.revision,
                name=gpu.name,
                spec=gpu_pb2.GpuSpec(parent=gpu.spec.parent) if gpu.spec.parent else None,
            )
        case GpuDialect.META:
            message = gpu_pb2.Gpu(metadata=gpu_pb2.ObjectMeta(name=gpu.name), resource_version=gpu.revision)
        case GpuDialect.NAME:
            message = named_pb2.NamedGpu(name=gpu.name, resource_version=gpu.revision)
        case GpuDialect.FIRST:
            message = first_pb2.Gpu(name=gpu.name)
        case GpuDialect.LATER | GpuDialect.LATER_NAMESPACED:
            namespace = NAMESPACE if dialect is GpuDialect.LATER_NAMESPACED else ""
            message = gpu_pb2.Gpu(metadata=gpu_pb2.ObjectMeta(namespace=namespace, **_object_meta(gpu)))
        case GpuDialect.TYPED:
            message = typed_pb2.TypedGpu(
                type_meta=_type_meta(GPU_KIND), object_meta=typed_pb2.TypedObjectMeta(**_object_meta(gpu))
            )
    _fill(message, gpu)
    return message.SerializeToString()


def _object_meta(gpu: Gpu) -> dict[str, Any]:
    seconds, nanos = divmod(gpu.created_at_ns, NS)
    return {
        "name": gpu.name,
        "resource_version": str(gpu.revision),
        "uid": gpu.uid,
        "generation": gpu.generation,
        "creation_timestamp": Timestamp(seconds=seconds, nanos=nanos),
    }


def _type_meta(kind: str) -> typed_pb2.TypeMeta:
    return typed_pb2.TypeMeta(kind=kind, api_version=GPU_API_VERSION)


def _fill(message: AnyGpu, gpu: Gpu) -> None:
    if gpu.spec.uuid is not None:
        message.spec.SetInParent()
        message.spec.uuid = gpu.spec.uuid
    if gpu.status is None:
        return
    message.status.SetInParent()
    message.status.recommended_action = gpu.status.recommended_action
    for entry in gpu.conditions:
        target = message.status.conditions.add()
        target.type, target.status = entry.type, entry.status
        target.reason, target.message = entry.reason, entry.message
        if entry.changed_at_ns is not None:
            seconds, nanos = divmod(entry.changed_at_ns, NS)
            target.last_transition_time.seconds = seconds
            target.last_transition_time.nanos = nanos


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _nested(field_number: int, body: bytes) -> bytes:
    """A length-delimited field, for stitching messages together from encoded parts."""
    return _varint(field_number << 3 | 2) + _varint(len(body)) + body


def encode_get(gpu: bytes) -> bytes:
    """`GetGpuResponse` around an encoded GPU; field 1 in every dialect."""
    return _nested(1, gpu)


def encode_list(gpus: list[bytes], version: int, dialect: GpuDialect, *, more: str = "") -> bytes:
    """`ListGpusResponse` around encoded GPUs; `more` is what the next page is asked with."""
    items = ITEMS_FIELD.get(dialect, 2)
    body = b"".join(_nested(items, gpu) for gpu in gpus)
    if dialect in VERSIONED_LISTS or more:
        metadata = _nested(1, str(version).encode())
        if more:
            metadata += _nested(CONTINUE_FIELD, more.encode())
        body = _nested(items - 1, metadata) + body
    if dialect is GpuDialect.TYPED:
        body = _nested(1, _type_meta(f"{GPU_KIND}List").SerializeToString()) + body
    return _nested(1, body)


def initial_events_end(version: int) -> bytes:
    """The `BOOKMARK` event that ends the initial events of a typed watch."""
    meta = typed_pb2.TypedObjectMeta(resource_version=str(version), annotations={INITIAL_EVENTS_END: "true"})
    gpu = typed_pb2.TypedGpu(type_meta=_type_meta(GPU_KIND), object_meta=meta)
    return encode_event("BOOKMARK", gpu.SerializeToString())


def encode_event(event_type: str, gpu: bytes) -> bytes:
    """`WatchGpusResponse` around an encoded GPU; the same fields in every dialect."""
    return _nested(1, event_type.encode()) + _nested(2, gpu)
