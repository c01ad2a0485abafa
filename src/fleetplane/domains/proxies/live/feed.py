"""All events of proxies, in the order of their revisions, for any number of clients."""

from __future__ import annotations

from fleetplane.domains.proxies.kinds.records import (
    CONFIG_PART,
    CONFIG_VERSION,
    ConfigVersionSpec,
    PartSpec,
    version_name,
)
from fleetplane.domains.proxies.live import events
from fleetplane.domains.proxies.live.events import ProxyEvent
from fleetplane.fleet.feeds.ring import RING_EVENTS, EventRing
from fleetplane.kernel.store import Store


class StoredVersions:
    """What versions of the configuration hold, for events that are about a difference."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def version(self, scope: str, number: int) -> ConfigVersionSpec | None:
        found = self._store.get(CONFIG_VERSION, scope, version_name(number))
        return found.spec if found is not None else None

    def part(self, scope: str, name: str) -> PartSpec | None:
        found = self._store.get(CONFIG_PART, scope, name)
        return found.spec if found is not None else None


def event_ring(store: Store, *, ring_events: int = RING_EVENTS) -> EventRing[ProxyEvent]:
    versions = StoredVersions(store)
    return EventRing(
        store,
        kinds=events.KINDS,
        events_of=lambda event: events.events_of(event, versions),
        ring_events=ring_events,
    )
