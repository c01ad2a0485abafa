"""What the API offers: every resource with its names, columns, verbs, actions and schema. Pure.

Each caller is told what it may do with each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fleetplane.fleet.resources import scopes, tables
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import DIALECT, Catalogue, ResourceEntry
from fleetplane.fleet.resources.declaration import ResourceShape
from fleetplane.fleet.resources.tables import TableColumn

WRITING = frozenset({"put", "patch", "delete"})


class DiscoveredAction(ResourceShape, frozen=True):
    name: str
    summary: str
    takes_time: bool
    """Whether it answers 202 with what it began."""
    body: Mapping[str, Any] | None
    """The JSON Schema of what it takes; null if nothing."""
    may: bool
    """Whether the caller may ask for it, in at least one scope."""


class DiscoveredLink(ResourceShape, frozen=True):
    resource: str
    path: str


class DiscoveredResource(ResourceShape, frozen=True):
    name: str
    plural: str
    short_names: Sequence[str]
    summary: str
    domains: Sequence[str]
    """The domains that have objects of it."""
    columns: Sequence[TableColumn]
    verbs: Sequence[str]
    """What can be done with its objects."""
    grows: bool
    """Whether there are only ever more, as of entries of the audit log: a watch of `*` leaves them out."""
    may: Sequence[str]
    """Those of the verbs that the caller may use, in at least one scope."""
    scopes: Sequence[str]
    """Where the caller may read it."""
    actions: Sequence[DiscoveredAction]
    relates: Sequence[DiscoveredLink]
    search: Sequence[str]
    """Paths of what a person might type to find it."""
    schema: Mapping[str, Any]
    """JSON Schema of its objects."""


class Discovery(ResourceShape, frozen=True):
    kind: str
    revision: int
    caller: str
    bound: Sequence[str]
    """Scopes at which the caller has a role."""
    resources: Sequence[DiscoveredResource]


def discovered(catalogue: Catalogue, sight: Sight, revision: int) -> Discovery:
    """The whole offer, as one caller sees it."""
    return Discovery(
        kind="discovery",
        revision=revision,
        caller=sight.caller_name,
        bound=sight.bound,
        resources=[_resource(entry, sight) for entry in catalogue.entries],
    )


def _resource(entry: ResourceEntry, sight: Sight) -> DiscoveredResource:
    resource = entry.resource
    where = tuple(dict.fromkeys(scope for one in sorted(entry.permissions) for scope in sight.granted(one)))
    verbs = sorted(resource.verbs)
    return DiscoveredResource(
        name=resource.name,
        plural=resource.plural,
        short_names=resource.short,
        summary=resource.summary,
        domains=[member.domain for member in entry.members],
        columns=tables.columns_of(resource),
        verbs=verbs,
        grows=resource.latest is not None,
        may=[verb for verb in verbs if may_use(entry, verb, sight)],
        scopes=[scope for scope in where if not scopes.covered(set(where) - {scope}, scope)],
        actions=[
            DiscoveredAction(
                name=action.name,
                summary=action.summary,
                takes_time=action.takes_time,
                body=None if action.body is None else schema_of(action.body),
                may=bool(sight.granted(action.permission)),
            )
            for action in entry.actions.values()
        ],
        relates=[DiscoveredLink(resource=link.resource, path=link.path) for link in resource.relates],
        search=resource.search,
        schema=entry.schema,
    )


def may_use(entry: ResourceEntry, verb: str, sight: Sight) -> bool:
    """Whether the caller may use a verb in at least one scope."""
    if verb in WRITING:
        writing = [one.resource.write for one in entry.members]
        return any(one is not None and bool(sight.granted(one.permission)) for one in writing)
    return any(bool(sight.granted(permission)) for permission in entry.permissions)


def schema_of(shape: type[msgspec.Struct]) -> dict[str, Any]:
    """A JSON Schema that stands alone, as editors take it."""
    return {"$schema": DIALECT, **msgspec.json.schema(shape)}
