"""Generations of clients under one name: which one sent a request, told from what it carries. Pure.

Clients of four generations call `nvidia.nvsentinel.v1alpha1.GpuService`. The first sends a name or nothing,
and reads `Gpu.name`. The later ones send namespaces and options, and read `Gpu.metadata`: to them an answer
for the first looks like an empty list, without an error. A request that carries a namespace or options is of
a later generation; what carries neither is decided by a setting or by the caller's metadata, and refused
where neither decides. The newest, whose objects say their kind and have all other fields one number further,
sends an empty namespace beside its options, which no other does, and writes objects of the kind `GPU`. Under
`nvidia.device.v1alpha1` the generations differ in methods alone, and in one field that was a number before it
was a text.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec
from google.protobuf.message import DecodeError, Message

from fleetplane.domains.gpus import wire
from fleetplane.domains.gpus.wire import GpuDialect
from fleetplane.gen.fleetplane.device.v1alpha1 import named_pb2, typed_pb2
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.gen.nvidia.nvsentinel.v1alpha1 import gpu_pb2 as first_pb2
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

MessageT = TypeVar("MessageT", bound=Message)
WriteT = TypeVar(
    "WriteT", first_pb2.CreateGpuRequest, first_pb2.UpdateGpuRequest, first_pb2.UpdateGpuStatusRequest
)
ReadT = named_pb2.LaterGetGpuRequest | named_pb2.LaterListGpusRequest

SETTING = "listeners.device-api.nvsentinel_generation"
LATER = (GpuDialect.LATER, GpuDialect.LATER_NAMESPACED)
NOT_OLDER = "NotOlderThan"
LONGEST_WATCH_SECONDS = 86_400.0
"""Longer ones than a day are as good as endless."""
PAGE_LIMIT = 5000
"""GPUs of a page, whatever is asked for."""
_OPTIONS_TAGS = (b"\x0a", b"\x12")
"""How encoded options begin; no namespace does."""


class Generation(StrEnum):
    """What requests that tell nothing are taken for."""

    AUTO = "auto"
    FIRST = "first"
    LATER = "later"
    TYPED = "typed"


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    name: str
    dialect: GpuDialect


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequest:
    dialect: GpuDialect
    resource_version: str = ""
    elsewhere: bool = False
    """It asks about a namespace in which nothing is."""
    initial_events: bool = False
    """A watch is to begin with what there is, and to say where that ends."""
    timeout_seconds: float = 0.0
    """After which a watch is to end; 0 for never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRange:
    """Which part of a list is wanted."""

    limit: int
    after: str = ""
    """The last name of the page before."""
    version: int | None = None
    """That the first page was true at."""


def get_request(raw: bytes, generation: Generation, asked: str | None) -> GetRequest:
    request = parsed(raw, named_pb2.LaterGetGpuRequest)
    namespace, _ = _told(request.namespace, request.opts)
    if namespace not in ("", wire.NAMESPACE):
        raise NotFound("gpu not found", field="namespace", details={"name": request.name})
    dialect = _dialect(request, namespace, generation, asked)
    return GetRequest(name=wire.gpu_name(request.name), dialect=dialect)


def list_request(raw: bytes, generation: Generation, asked: str | None) -> ListRequest:
    """The request of a list."""
    request = parsed(raw, named_pb2.LaterListGpusRequest)
    namespace, version = _told(request.namespace, request.opts)
    dialect = _dialect(request, namespace, generation, asked)
    elsewhere = namespace not in ("", wire.NAMESPACE)
    if dialect is not GpuDialect.TYPED:
        return ListRequest(dialect=dialect, resource_version=version, elsewhere=elsewhere)
    options = parsed(raw, typed_pb2.TypedListGpusRequest).opts
    if options.label_selector:
        raise InvalidArgument("GPUs have no labels here; select none", field="opts.label_selector")
    if options.send_initial_events and options.resource_version_match != NOT_OLDER:
        raise InvalidArgument(
            f"must be {NOT_OLDER} when send_initial_events is true", field="opts.resource_version_match"
        )
    return ListRequest(
        dialect=dialect,
        resource_version=options.resource_version,
        elsewhere=elsewhere,
        initial_events=options.send_initial_events,
        timeout_seconds=min(max(options.timeout_seconds, 0), LONGEST_WATCH_SECONDS),
    )


def watch_request(raw: bytes, generation: Generation, asked: str | None) -> ListRequest:
    """The request of a watch.

    A later client's informer asks first for a watch that begins with what there is, and waits for a bookmark
    that its generation cannot read. Refused, it lists and watches from there.
    """
    request = list_request(raw, generation, asked)
    if request.elsewhere:
        raise InvalidArgument(f"every GPU is in the namespace {wire.NAMESPACE}", field="namespace")
    if request.dialect in LATER and asked is None and wire.resource_version(request.resource_version) is None:
        raise FailedPrecondition(
            "resource_version is required: list first and watch from the version of that list",
            field="opts.resource_version",
            hint=f"or send the metadata {wire.DIALECT_HEADER}: {GpuDialect.LATER}, "
            "to begin with what there is",
        )
    return request


def write_request(
    raw: bytes, kind: type[WriteT], generation: Generation, asked: str | None
) -> tuple[gpu_pb2.Gpu, GpuDialect]:
    """The GPU of a write, in the numbers of the later generation, and the dialect of the answer."""
    said = parsed(raw, typed_pb2.KindOfGpuRequest).gpu.type_meta  # in a later one, name and version
    typed = said.kind == wire.GPU_KIND and "/" in said.api_version
    if generation is Generation.TYPED:
        typed = typed or not said.kind
    if asked == GpuDialect.TYPED or (asked is None and typed):
        return wire.untyped(parsed(raw, typed_pb2.TypedWriteGpuRequest).gpu), GpuDialect.TYPED
    gpu = parsed(raw, kind).gpu
    return gpu, GpuDialect.LATER_NAMESPACED if gpu.metadata.namespace else GpuDialect.LATER


def _told(namespace: bytes, options: gpu_pb2.ListOptions | gpu_pb2.GetOptions) -> tuple[str, str]:
    """Namespace and version, which one generation sends as options in the namespace's place."""
    if namespace[:1] in _OPTIONS_TAGS:
        between = parsed(namespace, gpu_pb2.ListOptions)
        return between.namespace, between.resource_version
    return namespace.decode("utf-8", "replace"), options.resource_version


def _dialect(request: ReadT, namespace: str, generation: Generation, asked: str | None) -> GpuDialect:
    """`request` says whether it carries a namespace or options, `namespace` which one."""
    later = GpuDialect.LATER_NAMESPACED if namespace else GpuDialect.LATER
    if asked is not None:
        if asked not in (GpuDialect.FIRST, GpuDialect.LATER, GpuDialect.TYPED):
            raise InvalidArgument(
                f"unknown dialect {asked!r} of this package; known are first, later, typed",
                field=wire.DIALECT_HEADER,
            )
        return later if asked == GpuDialect.LATER else GpuDialect(asked)
    spaced, opted = request.HasField("namespace"), request.HasField("opts")
    if spaced and opted and not request.namespace:
        return GpuDialect.TYPED
    if spaced or opted:
        return GpuDialect.TYPED if generation is Generation.TYPED else later
    if generation is Generation.AUTO:
        raise FailedPrecondition(
            "this request carries neither namespace nor options: clients of several generations may have sent"
            f" it, and each would misread another's answer; set {SETTING}",
            field=SETTING,
            hint=f"set it to first, later or typed, or send one as the metadata {wire.DIALECT_HEADER}",
        )
    return GpuDialect(generation)


def parsed(raw: bytes, kind: type[MessageT]) -> MessageT:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is not a {kind.DESCRIPTOR.name}: {error}", field="request"
        ) from error


def status_request(raw: bytes) -> tuple[gpu_pb2.ReplaceGpuStatusRequest, int | None]:
    """A status to be set, and the version that it is meant for, as number or text."""
    request = parsed(raw, gpu_pb2.ReplaceGpuStatusRequest)
    number = parsed(raw, named_pb2.NumberedGpuStatusRequest).resource_version
    return request, wire.written_version(request.resource_version or str(number or ""), "resource_version")


# Pages.


def page(options: gpu_pb2.ListOptions) -> ListRange | None:
    """What part of the list is asked for; None for all of it."""
    if options.limit < 0:
        raise InvalidArgument(f"limit is {options.limit}, below 0", field="opts.limit")
    if not options.limit and not options.continue_token:
        return None
    limit = min(options.limit or PAGE_LIMIT, PAGE_LIMIT)
    if not options.continue_token:
        return ListRange(limit=limit)
    try:
        raw = base64.b64decode(options.continue_token.encode("ascii"), altchars=b"-_", validate=True)
        version, after = msgspec.json.decode(raw, type=tuple[int, str])
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidArgument("is none that this server gave out", field="opts.continue_token") from error
    return ListRange(limit=limit, after=after, version=version)


def continue_token(version: int, after: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((version, after))).decode()
