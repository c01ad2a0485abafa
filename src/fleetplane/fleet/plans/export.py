"""All desired state that a caller may read, as objects that can be planned and applied elsewhere.

Without secrets, and without what belongs to this installation alone: uids, revisions, status. Objects come
in the order in which they are written, those that others refer to first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleetplane.fleet.plans.given import stripped_secrets
from fleetplane.fleet.resources import objects, scopes
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import Catalogue
from fleetplane.fleet.resources.declaration import ResourceShape
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Store

OBJECTS_LIMIT = 10_000
"""Of one export: about 1 KB each, so 10 MB."""
TURN = 200
"""Objects after which others have their turn."""


class ExportedMetadata(ResourceShape, frozen=True):
    name: str
    scope: str
    labels: Mapping[str, str]


class ExportedObject(ResourceShape, frozen=True):
    kind: str
    metadata: ExportedMetadata
    spec: Mapping[str, Any]


class Export(ResourceShape, frozen=True):
    """Can be given to `POST /apis/v1/plans` as it is, but for `kind` and `revision`."""

    kind: str
    revision: int
    objects: Sequence[ExportedObject]


async def exported(
    catalogue: Catalogue,
    store: Store,
    revision: int,
    sight: Sight,
    *,
    scope: str = scopes.ROOT,
    kinds: Collection[str] = (),
) -> Export:
    """Every object that can be written and that the caller may read, at and below a scope."""
    asked = {catalogue.named(word).resource.name for word in kinds}
    found: list[tuple[int, ExportedObject]] = []
    for entry in catalogue.entries:
        if asked and entry.resource.name not in asked:
            continue
        for number, one in enumerate(entry.all(store)):
            if number % TURN == TURN - 1:
                await asyncio.sleep(0)
            resource = one.member.resource
            write = resource.write
            if write is None or not scopes.covers(scope, one.called.scope):
                continue
            if not asked and not write.exported(one.stored):
                continue
            if not sight.may(resource.permission, one.called.scope):
                continue
            shown = objects.shown(resource, one.stored, store, called=one.called)
            found.append((write.rank, _exported(shown, one.stored.labels)))
            if len(found) > OBJECTS_LIMIT:
                raise InvalidArgument(
                    f"more than {OBJECTS_LIMIT} objects", field="scope", hint="export scope by scope"
                )
    found.sort(key=lambda pair: (pair[0], pair[1].kind, pair[1].metadata.scope, pair[1].metadata.name))
    return Export(kind="export", revision=revision, objects=[one for _, one in found])


def _exported(shown: Mapping[str, Any], labels: Mapping[str, str]) -> ExportedObject:
    metadata = shown["metadata"]
    return ExportedObject(
        kind=shown["kind"],
        metadata=ExportedMetadata(name=metadata["name"], scope=metadata["scope"], labels=dict(labels)),
        spec=stripped_secrets(shown["spec"]),
    )
