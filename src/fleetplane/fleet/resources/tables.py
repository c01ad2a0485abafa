"""Tables of objects: cells by the declared columns, so that every client prints the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.fleet.resources.declaration import AnyPublicResource, Column, ResourceShape
from fleetplane.fleet.resources.listing import ObjectPage
from fleetplane.fleet.resources.objects import ObjectReference, at

CONTENT_TYPE = "application/vnd.fleetplane.table+json"
Cell = str | int | float | bool | None
Shown = Mapping[str, Any]
"""An object in plain values."""


class TableColumn(ResourceShape, frozen=True):
    title: str
    type: str
    """`text`, `number`, or `age`: the cell is a moment, to be shown as the time since then."""
    wide: bool
    """Shown only where there is room, or where more is asked for."""


class TableRow(ResourceShape, frozen=True):
    cells: Sequence[Cell]
    object: ObjectReference


class FullRow(TableRow, frozen=True):
    """A row with everything that is known of its object, for those who show both."""

    value: Mapping[str, Any]


class Table(ResourceShape, frozen=True):
    kind: str
    columns: Sequence[TableColumn]
    rows: Sequence[TableRow]
    revision: int
    continue_: str | None = msgspec.field(name="continue")


def columns_of(resource: AnyPublicResource) -> Sequence[TableColumn]:
    """The columns of a resource's table."""
    return [TableColumn(title=one.title, type=one.type, wide=one.wide) for one in resource.columns]


def cells_of(resource: AnyPublicResource, shown: Mapping[str, Any]) -> Sequence[Cell]:
    """One row of it."""
    return [_cell(column, shown) for column in resource.columns]


def table(resource: AnyPublicResource, page: ObjectPage) -> Table:
    """A page of a list as a table."""
    return Table(
        kind="table",
        columns=columns_of(resource),
        rows=[row(resource, shown) for shown in page.items],
        revision=page.revision,
        continue_=page.following,
    )


def row(resource: AnyPublicResource, shown: Shown) -> TableRow:
    """One object as a row."""
    return TableRow(cells=cells_of(resource, shown), object=_reference(resource, shown))


def _reference(resource: AnyPublicResource, shown: Mapping[str, Any]) -> ObjectReference:
    metadata = shown["metadata"]
    return ObjectReference(
        resource=resource.plural, name=metadata["name"], scope=metadata["scope"], uid=metadata["uid"]
    )


def _cell(column: Column, shown: Mapping[str, Any]) -> Cell:
    found = at(shown, column.value) if isinstance(column.value, str) else column.value(shown)
    if isinstance(found, list | tuple):
        return ",".join(str(one) for one in found)
    if isinstance(found, Mapping):
        return ",".join(f"{key}={value}" for key, value in found.items())
    return found  # type: ignore[no-any-return]  # JSON has nothing else
