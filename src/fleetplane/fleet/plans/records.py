"""The stored record of a plan, and the resources that plans can write.

The resource has what may be known of it: whose it is, when it ends, and the tag of everything that it was
based on. Objects and field values lie beside it, sealed by the master key, since specs may hold secrets.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec

from fleetplane.fleet.plans.decisions import PlannedStep
from fleetplane.fleet.resources.declaration import AnyPublicResource, ResourceVerb, Writable
from fleetplane.kernel.errors import InvalidArgument, SettingsError
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.resources import BODY_LIMIT_BYTES, AnyResource, Kind, Resource
from fleetplane.web.rest.routes import etag

WRITING = frozenset({ResourceVerb.PUT, ResourceVerb.PATCH, ResourceVerb.DELETE})


def with_writing(
    resources: Iterable[AnyPublicResource], writers: Mapping[str, Writable]
) -> tuple[AnyPublicResource, ...]:
    """The resources, those that have a writer by their name with the verbs that write."""
    declared = tuple(resources)
    unknown = writers.keys() - {one.name for one in declared}
    if unknown:
        raise SettingsError(f"nobody declares what could be written as {', '.join(sorted(unknown))}")
    return tuple(
        replace(one, verbs=one.verbs | WRITING, write=writers[one.name]) if one.name in writers else one
        for one in declared
    )


SCOPE = ""
_UNPACKED_LIMIT_BYTES = 16 * 1024 * 1024
"""Of a sealed document once unpacked: a request of 1 MiB, old and new values, and room for names."""


class PlanRead(msgspec.Struct, frozen=True, array_like=True):
    """One resource that a plan was based on."""

    kind: str
    scope: str
    name: str
    tag: str
    """Empty if it was not there."""
    called: str
    """For people."""


class PlanList(msgspec.Struct, frozen=True, array_like=True):
    """All resources of a kind at a scope, as a plan was based on them."""

    kind: str
    scope: str
    tag: str
    called: str


class PlanSpec(msgspec.Struct, frozen=True, kw_only=True):
    created_by: str
    expires_at_ns: int
    revision: int
    """That it was computed at."""
    scope: str
    """As the API spells it: where it prunes."""
    owner: str = ""
    prune: bool = False
    reads: tuple[PlanRead, ...] = ()
    lists: tuple[PlanList, ...] = ()


class PlanStatus(msgspec.Struct, frozen=True, kw_only=True):
    applied_at_ns: int
    revision: int
    """Of the transaction that applied it."""


PLAN: Kind[PlanSpec, PlanStatus] = Kind("plan", PlanSpec, PlanStatus)
PlanResource = Resource[PlanSpec, PlanStatus]


class PlannedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One object as a plan's author gave it."""

    kind: str
    scope: str
    name: str
    spec: msgspec.Raw
    """JSON."""
    labels: dict[str, str] | None = None
    uid: str = ""


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The sealed part of a plan."""

    objects: tuple[PlannedObject, ...]
    steps: tuple[PlannedStep, ...]
    take_over: bool = False


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(PlanDocument)


def secret_name(plan: str) -> str:
    """Under which a plan's document lies."""
    return f"plans/{plan}"


def sealed(document: PlanDocument, plan: str, master: MasterKey) -> bytes:
    """The document as it is stored."""
    name = secret_name(plan)
    blob = master.seal(zlib.compress(_ENCODER.encode(document), level=1), purpose=name)
    if len(blob) > BODY_LIMIT_BYTES:
        raise InvalidArgument(
            f"the plan takes {len(blob)} bytes, more than {BODY_LIMIT_BYTES}",
            field="objects",
            hint="plan fewer objects at once",
        )
    return blob


def opened(blob: bytes, plan: str, master: MasterKey) -> PlanDocument:
    """The inverse of `sealed`."""
    packed = master.open(blob, purpose=secret_name(plan))
    return _DECODER.decode(zlib.decompressobj().decompress(packed, _UNPACKED_LIMIT_BYTES))


def tag(resource: AnyResource | None) -> str:
    """Changes with spec and labels of this incarnation, not with what is reported about it."""
    if resource is None:
        return ""
    labels = msgspec.msgpack.encode(sorted(resource.labels.items()))
    return f"{etag(resource)}-{hashlib.blake2b(labels, digest_size=6).hexdigest()}"


def list_tag(resources: Iterable[AnyResource]) -> str:
    """The tag of a whole list."""
    digest = hashlib.blake2b(digest_size=12)
    for resource in resources:
        digest.update(f"{resource.scope}\0{resource.name}\0{tag(resource)}\n".encode())
    return digest.hexdigest()
