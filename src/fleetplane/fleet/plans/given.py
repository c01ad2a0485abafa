"""Objects as callers give them: read strictly, field by field. Pure.

A whole object as the API shows it may be given back: what it says beside name, scope, labels and spec is
either checked against what is there (`uid`) or left alone (`status`, `conditions`, counters).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from fleetplane.fleet.plans.documents import Json, merge_patch
from fleetplane.fleet.resources.declaration import ResourceShape
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.values.documents import check_document
from fleetplane.web.rest import bodies
from fleetplane.web.rest.problems import Problem, Rejected


class GivenMetadata(ResourceShape, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    scope: str = ""
    labels: dict[str, str] | None = None
    """Left out, the labels stay as they are."""
    uid: str = ""
    """Where it is given, of the very object that is there."""
    revision: int | None = None
    generation: int | None = None
    created_at: str | None = None


class GivenObject(ResourceShape, frozen=True, forbid_unknown_fields=True):
    """One object as it should be."""

    spec: dict[str, Any]
    kind: str = ""
    metadata: GivenMetadata = GivenMetadata()
    status: Any = None
    """Not written; an object that was read may be given back whole."""
    conditions: Any = None
    """Not written."""


class GivenPatch(ResourceShape, frozen=True, forbid_unknown_fields=True):
    """A merge patch of an object: of its labels and its spec."""

    spec: dict[str, Any] = msgspec.field(default_factory=dict)
    metadata: GivenPatchMetadata | None = None


class GivenPatchMetadata(ResourceShape, frozen=True, forbid_unknown_fields=True):
    labels: dict[str, str | None] = msgspec.field(default_factory=dict)


def decoded_spec(spec: Mapping[str, Any], shape: type[Any], *, field: str) -> Any:
    """A spec as its shape; `Rejected` names the field with the path that leads to it."""
    check_document(spec, field=field)
    try:
        return bodies.decode(msgspec.json.encode(spec), shape)
    except Rejected as error:
        raise under(error, field) from error


def under(error: InvalidArgument, field: str) -> InvalidArgument:
    """The same refusal, with its fields below another."""
    if isinstance(error, Rejected):
        return Rejected(
            *(
                Problem(field=_join(field, problem.field), message=problem.message, code=problem.code)
                for problem in error.problems
            )
        )
    return InvalidArgument(
        error.message,
        field=_join(field, error.field or ""),
        hint=error.advice or None,
        details=error.details,
    )


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


def patched(
    labels: Mapping[str, str], spec: Mapping[str, Any], patch: GivenPatch
) -> tuple[dict[str, str], dict[str, Any]]:
    """Labels and spec after a merge patch."""
    after = merge_patch(cast("Json", dict(spec)), cast("Json", patch.spec))
    wanted = patch.metadata.labels if patch.metadata is not None else {}
    merged = merge_patch(cast("Json", dict(labels)), cast("Json", wanted))
    return cast("dict[str, str]", merged), cast("dict[str, Any]", after)


def stripped_secrets(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec without what says only whether a secret is there, which cannot be applied elsewhere."""
    return {key: _stripped(value) for key, value in spec.items() if value not in _SECRETS}


_SECRETS = ({"set": True}, {"set": False})


def _stripped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return stripped_secrets(value)
    return list(map(_stripped, value)) if isinstance(value, list | tuple) else value
