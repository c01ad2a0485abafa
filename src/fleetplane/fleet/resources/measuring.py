"""Where something was measured or written down, so that who may read it there asks for it again.

Telemetry knows scopes and sources of rows; both are those of the stored object that they are about. From
them comes where the object lies and who may read it. Looked up once for all watchers, when one of them asks.
A server that only reads does not know what another one has written: whoever could see such things asks again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from fleetplane.fleet.resources import scopes
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import Catalogue
from fleetplane.fleet.resources.declaration import ResourceVerb
from fleetplane.kernel.access import Permission
from fleetplane.kernel.store import Store
from fleetplane.kernel.telemetry import Telemetry

TOLD_OF = frozenset({ResourceVerb.FIGURES, ResourceVerb.LOGS})
PLACES_LIMIT = 20_000
"""Workspaces, groups, tenants and clusters that are remembered, about 200 bytes each."""


class MeasuredMark(NamedTuple):
    """How far a watcher was told."""

    number: int
    """Of what this server wrote."""
    elsewhere: int
    """Of what others did."""


class Measurements:
    """See the module. Without `telemetry` nothing is ever measured here."""

    def __init__(self, store: Store, catalogue: Catalogue, telemetry: Telemetry | None) -> None:
        self._store = store
        self._telemetry = telemetry
        self._resources = tuple(
            member.resource
            for entry in catalogue.entries
            for member in entry.members
            if member.resource.is_stored and member.resource.verbs & TOLD_OF
        )
        self._looked = self.mark.number
        self._places: OrderedDict[tuple[Permission, str], int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Measurements {self.mark} places={len(self._places)}>"

    @property
    def mark(self) -> MeasuredMark:
        """Another whenever something was measured anywhere."""
        if self._telemetry is None:
            return MeasuredMark(0, 0)
        return MeasuredMark(self._telemetry.news.number, self._telemetry.elsewhere)

    def is_news(self, after: MeasuredMark, watched: Collection[str], sight: Sight) -> bool:
        """Whether something was measured after a mark that lies in a watched scope and may be read."""
        self._look()
        for permission, place in reversed(self._places):
            if self._places[permission, place] <= after.number:
                break
            if scopes.covered(watched, place) and sight.may(permission, place):
                return True
        if self.mark.elsewhere == after.elsewhere:
            return False
        permissions = {resource.permission for resource in self._resources}
        return any(sight.sees(permissions, scope) for scope in watched)

    def _look(self) -> None:
        if self._telemetry is None or self.mark.number == self._looked:
            return
        news = self._telemetry.news
        found: set[tuple[Permission, str]] = set()
        for scope, source in news.since(self._looked):
            for resource in self._resources:
                stored = self._store.get(resource.kind, scope, source)
                if stored is not None and resource.shows(stored):
                    found.add((resource.permission, resource.place(stored, self._store)))
        self._looked = news.number
        for key in found:
            self._places[key] = self._looked
            self._places.move_to_end(key)
        while len(self._places) > PLACES_LIMIT:
            self._places.popitem(last=False)
