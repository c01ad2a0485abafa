"""Generations of clients under one name: which one sent a request, told from what it carries. Pure.

Clients of three generations call `nvidia.nvsentinel.v1alpha1.GpuService`. The first sends a name or nothing,
and reads `Gpu.name`. The later ones send namespaces and options, and read `Gpu.metadata`: to them an answer
for the first looks like an empty list, without an error. A request that carries a namespace or options is of
a later generation; what carries neither is decided by a setting or by the caller's metadata, and refused
where neither decides. Under `nvidia.device.v1alpha1` the generations differ in methods alone, and in one
field that was a number before it was a text.
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
from fleetplane.domains.gpus.wire import Dialect
from fleetplane.gen.fleetplane.device.v1alpha1 import named_pb2
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

MessageT = TypeVar("MessageT", bound=Message)

SETTING = "listeners.device-api.nvsentinel_generation"
PAGE_LIMIT = 5000
"""GPUs of a page, whatever is asked for."""
_OPTIONS_TAGS = (b"\x0a", b"\x12")
"""How encoded options begin; no namespace does."""


class Generation(StrEnum):
    """What requests that tell nothing are taken for."""

    AUTO = "auto"
    FIRST = "first"
    LATER = "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    name: str
    dialect: Dialect


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequest:
    dialect: Dialect
    resource_version: str = ""
    elsewhere: bool = False
    """It asks about a namespace in which nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which part of a list is wanted."""

    limit: int
    after: str = ""
    """The last name of the page before."""
    version: int | None = None
    """That the first page was true at."""


def get_request(raw: bytes, generation: Generation, asked: str | None) -> GetRequest:
    request = parsed(raw, named_pb2.LaterGetGpuRequest)
    tells = request.HasField("namespace") or request.HasField("opts")
    dialect = _dialect(generation, asked, tells=tells)
    namespace, _ = _told(request.namespace, request.opts)
    if namespace not in ("", wire.NAMESPACE):
        raise NotFound("gpu not found", field="namespace", details={"name": request.name})
    return GetRequest(name=wire.gpu_name(request.name), dialect=dialect)


def list_request(raw: bytes, generation: Generation, asked: str | None) -> ListRequest:
    """The request of a list or a watch."""
    request = parsed(raw, named_pb2.LaterListGpusRequest)
    tells = request.HasField("namespace") or request.HasField("opts")
    dialect = _dialect(generation, asked, tells=tells)
    namespace, version = _told(request.namespace, request.opts)
    elsewhere = namespace not in ("", wire.NAMESPACE)
    return ListRequest(dialect=dialect, resource_version=version, elsewhere=elsewhere)


def _told(namespace: bytes, options: gpu_pb2.ListOptions | gpu_pb2.GetOptions) -> tuple[str, str]:
    """Namespace and version, which one generation sends as options in the namespace's place."""
    if namespace[:1] in _OPTIONS_TAGS:
        between = parsed(namespace, gpu_pb2.ListOptions)
        return between.namespace, between.resource_version
    return namespace.decode("utf-8", "replace"), options.resource_version


def _dialect(generation: Generation, asked: str | None, *, tells: bool) -> Dialect:
    if asked is not None:
        if asked not in (Dialect.FIRST, Dialect.LATER):
            raise InvalidArgument(
                f"unknown dialect {asked!r} of this package; known are first, later",
                field=wire.DIALECT_HEADER,
            )
        return Dialect(asked)
    if tells:
        return Dialect.LATER
    if generation is Generation.AUTO:
        raise FailedPrecondition(
            "this request carries neither namespace nor options: clients of two generations may have sent it,"
            f" and each would misread the other's answer; set {SETTING}",
            field=SETTING,
            hint=f"set it to first or later, or send the metadata {wire.DIALECT_HEADER} with one of them",
        )
    return Dialect(generation)


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
    return request, expected(request.resource_version or str(number or ""), "resource_version")


def expected(text: str, field: str) -> int | None:
    """The version that a write is meant for; None if it is meant for any."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidArgument(f'invalid resource_version "{text[:40]}": must be numeric', field=field)
    return int(text)


# Pages.


def page(options: gpu_pb2.ListOptions) -> Page | None:
    """What part of the list is asked for; None for all of it."""
    if options.limit < 0:
        raise InvalidArgument(f"limit is {options.limit}, below 0", field="opts.limit")
    if not options.limit and not options.continue_token:
        return None
    limit = min(options.limit or PAGE_LIMIT, PAGE_LIMIT)
    if not options.continue_token:
        return Page(limit=limit)
    try:
        raw = base64.b64decode(options.continue_token.encode("ascii"), altchars=b"-_", validate=True)
        version, after = msgspec.json.decode(raw, type=tuple[int, str])
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidArgument("is none that this server gave out", field="opts.continue_token") from error
    return Page(limit=limit, after=after, version=version)


def continue_token(version: int, after: str) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((version, after))).decode()
