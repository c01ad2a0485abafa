"""Events of watches, the batches they come in, and coalescing.

Pure. Knows neither who watches nor where events are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec

from fleetplane.kernel.resources import AnyResource


class EventType(StrEnum):
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class Event(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One change of one resource."""

    type: EventType
    resource: AnyResource
    """As it is after the change; the last state, with the deletion's revision, for DELETED."""
    revision: int
    memo: dict[object, object] = msgspec.field(default_factory=dict)
    """Shared by all watchers: where an edge keeps its encoded form, so that fan-out encodes once."""


class EventBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Whole transactions, up to and including `revision`. Without events: a bookmark."""

    revision: int
    events: Sequence[Event] = ()
    memo: dict[object, object] = msgspec.field(default_factory=dict)
    """Like an event's memo, for those who encode whole batches."""


class EventPage(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of history: every event after the asked revision up to and including `revision`."""

    revision: int
    events: Sequence[Event]


def coalesce(events: Iterable[Event]) -> list[Event]:
    """Only what still matters of `events`, per object, to one who saw everything before them.

    An object added and gone again in between is not mentioned. One that was deleted and made
    again is two objects of the same name, and both facts are told, in order. Whoever is cut off in the
    middle and goes on after the last event that came may lack, up to the end of `events`, an object that is
    gone by then.
    """
    by_key: dict[object, list[Event]] = {}
    for event in events:
        by_key.setdefault(event.resource.key, []).append(event)
    kept = [event for history in by_key.values() for event in _essence(history)]
    kept.sort(key=revision_of)
    return kept


def _essence(history: Sequence[Event]) -> Iterator[Event]:
    first, last = history[0], history[-1]
    seen_before = first.type is not EventType.ADDED
    gone = next((event for event in history if event.type is EventType.DELETED), None)
    if seen_before and gone is not None:
        yield gone  # the incarnation that the watcher knew
    if last.type is EventType.DELETED:
        return
    kind = EventType.MODIFIED if seen_before and gone is None else EventType.ADDED
    yield last if last.type is kind else Event(type=kind, resource=last.resource, revision=last.revision)


def revision_of(event: Event) -> int:
    return event.revision


def enclosing(scope: str) -> Iterator[str]:
    """Every scope whose watchers care about `scope`: itself, its parents, and the root."""
    yield scope
    while scope:
        scope, _, _ = scope.rpartition("/")
        yield scope
