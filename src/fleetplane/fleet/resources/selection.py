"""Which objects a caller asks for: by labels, by fields, and in which order. Pure.

labels=role=web,env!=test           the selector language of every fleet, over labels
fields=status.state=connected       paths of the object as it is shown; = and != of one value each
sort=-status.lastSeenAt,metadata.name
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetplane.fleet import selectors
from fleetplane.fleet.resources.objects import at
from fleetplane.fleet.selectors import REQUIREMENTS_LIMIT, SELECTOR_LIMIT, Selector
from fleetplane.kernel.errors import InvalidArgument

SORT_LIMIT = 3
PATH_LIMIT = 256
_PATH = re.compile(r"\.?(metadata|spec|status)(\.[A-Za-z0-9_./-]+)+|\.?kind")
_COMPARED = re.compile(r"(?P<path>[^=!]+)(?P<op>==|!=|=)(?P<value>.*)", re.DOTALL)


EVERY_LABEL = Selector()


@dataclass(frozen=True, slots=True)
class FieldRequirement:
    """One path and the text that it should, or should not, have."""

    path: str
    wanted: bool
    value: str

    def holds(self, shown: Mapping[str, Any]) -> bool:
        """Whether an object meets it. Of a list, one of its values is enough."""
        found = at(shown, self.path)
        values = found if isinstance(found, list | tuple) else (found,)
        return any(text_of(one) == self.value for one in values) is self.wanted


@dataclass(frozen=True, slots=True)
class SortOrder:
    """One key of an order."""

    path: str
    descending: bool


@dataclass(frozen=True, slots=True)
class ObjectSelection:
    """What of a resource is asked for."""

    labels: Selector = EVERY_LABEL
    fields: tuple[FieldRequirement, ...] = ()

    def matches(self, shown: Mapping[str, Any]) -> bool:
        """Whether an object, as it is shown, is meant."""
        return self.labels.matches(shown["metadata"]["labels"]) and all(
            requirement.holds(shown) for requirement in self.fields
        )

    @property
    def is_everything(self) -> bool:
        return not self.labels.requirements and not self.fields


EVERYTHING = ObjectSelection()


def selection(query: Mapping[str, str]) -> ObjectSelection:
    """The selection of a request; raises `InvalidArgument`."""
    labels = EVERY_LABEL
    if text := query.get("labels", "").strip():
        selectors.check(text, field="labels")
        labels = selectors.parse(text, field="labels")
    return ObjectSelection(labels, fields(query.get("fields", "")))


def fields(text: str) -> tuple[FieldRequirement, ...]:
    """Requirements of fields, separated by commas."""
    if not text.strip():
        return ()
    if len(text) > SELECTOR_LIMIT:
        raise InvalidArgument(f"is longer than {SELECTOR_LIMIT} characters", field="fields")
    parts = text.split(",")
    if len(parts) > REQUIREMENTS_LIMIT:
        raise InvalidArgument(f"has more than {REQUIREMENTS_LIMIT} requirements", field="fields")
    return tuple(_field(part.strip()) for part in parts)


def _field(part: str) -> FieldRequirement:
    found = _COMPARED.fullmatch(part)
    if found is None or not _is_path(found["path"].strip()):
        raise InvalidArgument(
            f"{part[:80]!r} is no requirement of a field",
            field="fields",
            hint="write PATH=VALUE or PATH!=VALUE, such as status.state=connected",
        )
    return FieldRequirement(found["path"].strip(), found["op"] != "!=", found["value"].strip())


def order(text: str) -> tuple[SortOrder, ...]:
    """The order of a list; by scope and name where nothing is asked for."""
    if not text.strip():
        return ()
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > SORT_LIMIT:
        raise InvalidArgument(f"has {len(parts)} keys; an order has at most {SORT_LIMIT}", field="sort")
    for part in parts:
        if not _is_path(part.removeprefix("-")):
            raise InvalidArgument(
                f"{part[:80]!r} is no path", field="sort", hint="write a path such as -metadata.createdAt"
            )
    return tuple(SortOrder(part.removeprefix("-"), part.startswith("-")) for part in parts)


def _is_path(text: str) -> bool:
    return len(text) <= PATH_LIMIT and _PATH.fullmatch(text) is not None


def text_of(value: Any) -> str:
    """A value as a selector writes it: texts as they are, others as JSON has them, nothing as empty."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


Rank = tuple[int, Any]
"""The place of one value in an order: nothing, then numbers, then texts."""


def rank(value: Any) -> Rank:
    """Values of different sorts have an order too, so that no list fails for what one object shows."""
    if value is None:
        return (0, 0)
    if isinstance(value, bool | int | float):
        return (1, value)
    return (2, text_of(value))


def ranks(shown: Mapping[str, Any], keys: Sequence[SortOrder]) -> list[Rank]:
    """The place of an object in an order, key by key."""
    return [rank(at(shown, key.path)) for key in keys]
