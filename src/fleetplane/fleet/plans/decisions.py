"""What a plan comes to: for each object what would be done, and which objects are pruned. Pure.

Objects are given as they are shown before and after; how the one becomes the other is the domains'
business. Pruning is by owner label and scope alone: what carries no owner, or another, is never deleted by
leaving it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, cast

import msgspec

from fleetplane.fleet.plans.documents import FieldChange, Json, difference
from fleetplane.kernel.errors import Conflict, InvalidArgument

OWNER_LABEL = "fleetplane/owner"
"""The label of objects that a plan with an owner writes; pruning looks for it."""


class ObjectAddress(NamedTuple):
    """Which object: the name of its resource, its scope as the API spells it, and its name."""

    kind: str
    scope: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name} in {self.scope}"


class PlanOperation(StrEnum):
    CREATE = "create"
    CHANGE = "change"
    NOTHING = "nothing"
    DELETE = "delete"


class ShownPart(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an object that says what should be."""

    labels: dict[str, str] = {}
    spec: dict[str, Json] = {}


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What would be done to one object."""

    operation: PlanOperation
    kind: str
    scope: str
    name: str
    changes: tuple[FieldChange, ...] = ()
    """Field by field; of an object that is created the fields it will have, of one that goes nothing."""
    warnings: tuple[str, ...] = ()
    disturbs: tuple[str, ...] = ()
    """What it would interrupt, as its domain predicts it: reloads, replaced machines, restarted programs."""
    pruned: bool = False
    """Whether it would be deleted because its owner no longer names it."""

    @property
    def address(self) -> ObjectAddress:
        return ObjectAddress(self.kind, self.scope, self.name)


def operation(
    before: ShownPart | None, after: ShownPart | None
) -> tuple[PlanOperation, tuple[FieldChange, ...]]:
    """What leads from an object before to the same object after; None is an object that is not there."""
    if after is None:
        return (PlanOperation.NOTHING if before is None else PlanOperation.DELETE), ()
    if before is None:
        return PlanOperation.CREATE, tuple(difference(_document(ShownPart()), _document(after)))
    changes = tuple(difference(_document(before), _document(after)))
    return (PlanOperation.CHANGE, changes) if changes else (PlanOperation.NOTHING, ())


def _document(shown: ShownPart) -> Json:
    return {"metadata": {"labels": cast("Json", dict(shown.labels))}, "spec": shown.spec}


def prunable(
    owned: Iterable[tuple[ObjectAddress, Mapping[str, str]]],
    *,
    owner: str,
    scope: str,
    named: Collection[ObjectAddress],
) -> list[ObjectAddress]:
    """Which of the objects that exist an owner has given up: its own, within the scope, and not named."""
    return [
        address
        for address, labels in owned
        if labels.get(OWNER_LABEL) == owner and _covers(scope, address.scope) and address not in named
    ]


def _covers(scope: str, other: str) -> bool:
    return scope in ("/", other) or other.startswith(scope + "/")


def owned_labels(
    given: Mapping[str, str] | None, present: Mapping[str, str], *, owner: str
) -> dict[str, str]:
    """The labels to write: those given, else those present; and the owner's, if there is one."""
    labels = dict(present if given is None else given)
    if owner:
        labels[OWNER_LABEL] = owner
    return labels


def ownership_warning(
    address: ObjectAddress, present: Mapping[str, str], *, owner: str, take_over: bool
) -> str:
    """What to tell about the owner of an object that is there already; raises where another owner has it."""
    holder = present.get(OWNER_LABEL, "")
    if not owner or holder == owner:
        return ""
    if not holder:
        return f"had no owner and will belong to {owner}: a later plan of {owner} that prunes can delete it"
    if not take_over:
        raise Conflict(
            f"{address} belongs to {holder}, not {owner}",
            field="owner",
            hint="leave it out, or set takeOver to make it yours",
        )
    return f"belongs to {holder} and will belong to {owner}"


def check_unique(addresses: Sequence[ObjectAddress]) -> None:
    """Refuse a plan that names an object twice."""
    seen: set[ObjectAddress] = set()
    for number, address in enumerate(addresses):
        if address in seen:
            raise InvalidArgument(f"{address} is given twice", field=f"objects[{number}]")
        seen.add(address)
