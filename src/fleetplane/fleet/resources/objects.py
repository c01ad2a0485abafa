"""Objects of the API: the envelope around what a view shows, and its types for schemas. Pure.

{"kind", "metadata": {"name", "scope", "uid", "labels", "revision", "generation", "createdAt"},
 "spec", "status", "conditions": [{"type", "status", "reason", "message", "changedAt", "observedBy"}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.fleet.resources.declaration import AnyPublicResource, ResourceShape, ViewReader
from fleetplane.kernel.resources import AnyResource, Condition
from fleetplane.kernel.values.times import spelled, spelled_or_null


class ObjectMetadata(ResourceShape, frozen=True):
    name: str
    """Unique in its scope."""
    scope: str
    """Where it lies, such as `/tenants/acme`."""
    uid: str
    """Of this incarnation: an object deleted and made again has another one."""
    labels: Mapping[str, str]
    revision: int
    """Of the last change."""
    generation: int
    """Counts the changes of `spec`, from 1."""
    created_at: str


class ObjectCondition(ResourceShape, frozen=True):
    """One finding about an object, such as `Ready` being `False`."""

    type: str
    status: str
    reason: str
    message: str
    changed_at: str | None
    """When `status` last changed; null if unknown."""
    observed_by: str


class ObjectReference(ResourceShape, frozen=True):
    """Which object is meant."""

    resource: str
    """Its plural, such as `gpus`."""
    name: str
    scope: str
    uid: str = ""


class ObjectIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What an object is called, and where it lies."""

    name: str
    scope: str


def identity(resource: AnyPublicResource, stored: AnyResource, reading: ViewReader) -> ObjectIdentity:
    """What the object of a stored resource is called."""
    return ObjectIdentity(name=resource.named(stored, reading), scope=resource.place(stored, reading))


def object_type(resource: AnyPublicResource) -> type[msgspec.Struct]:
    """The type of whole objects, named after the resource, for schemas and clients."""
    return msgspec.defstruct(
        type_name(resource.name),
        [
            ("kind", str),
            ("metadata", ObjectMetadata),
            ("spec", resource.spec),
            ("status", resource.status | None),
            ("conditions", Sequence[ObjectCondition]),
        ],
        namespace={"__doc__": f"{resource.summary}."},
        frozen=True,
        kw_only=True,
        rename="camel",
        module=__name__,
    )


def list_type(resource: AnyPublicResource, item: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The type of one page of a list."""
    return msgspec.defstruct(
        f"{type_name(resource.name)}List",
        [
            ("kind", str),
            ("items", Sequence[item]),  # type: ignore[valid-type]  # a type made at run time
            ("revision", int),
            ("continue_", str | None, msgspec.field(name="continue")),
        ],
        frozen=True,
        kw_only=True,
        rename="camel",
        module=__name__,
    )


def type_name(name: str) -> str:
    """`edge-node` as the name of a type: `EdgeNode`."""
    return "".join(part.capitalize() for part in name.split("-"))


def shown(
    resource: AnyPublicResource,
    stored: AnyResource,
    reading: ViewReader,
    *,
    called: ObjectIdentity | None = None,
) -> dict[str, Any]:
    """A stored resource as an object of the API, in plain values as JSON has them."""
    view = resource.view(stored, reading)
    named = called or identity(resource, stored, reading)
    conditions = stored.conditions if view.conditions is None else view.conditions
    labels = stored.labels if view.labels is None else view.labels
    return {
        "kind": resource.name,
        "metadata": {
            "name": named.name,
            "scope": named.scope,
            "uid": stored.uid,
            "labels": dict(labels),
            "revision": stored.revision,
            "generation": stored.generation,
            "createdAt": spelled(stored.created_at_ns),
        },
        "spec": msgspec.to_builtins(view.spec),
        "status": msgspec.to_builtins(view.status),
        "conditions": [_condition(one) for one in conditions],
    }


def _condition(found: Condition) -> dict[str, Any]:
    return {
        "type": found.type,
        "status": found.status,
        "reason": found.reason,
        "message": found.message,
        "changedAt": spelled_or_null(found.changed_at_ns),
        "observedBy": found.writer,
    }


def at(shown_object: Mapping[str, Any], path: str) -> Any:
    """What lies at a path such as `.status.state`; None where nothing does. A label's key may have dots."""
    found: Any = shown_object
    rest = path.removeprefix(".")
    while rest:
        if not isinstance(found, Mapping):
            return None
        if rest in found:  # a key with dots, such as a label's
            return found[rest]
        key, _, rest = rest.partition(".")
        found = found.get(key)
    return found
