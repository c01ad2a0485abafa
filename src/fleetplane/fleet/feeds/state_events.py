"""The event feed: every change of the state of an object, made from the log that all servers follow.

Nothing is written for it. A domain says of a resource what its state is. A change of the record, by whatever
way and on whichever server, is the same event under the same name on every server. A server that starts reads
back what the log still has.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fleetplane.fleet.resources.catalogue import CatalogueMember
from fleetplane.fleet.resources.common import NoStatus, as_stored, made_up
from fleetplane.fleet.resources.declaration import (
    Column,
    ObjectState,
    ObservedPart,
    PublicResource,
    ResourceShape,
)
from fleetplane.fleet.resources.objects import ObjectIdentity
from fleetplane.kernel.resources import AnyResource, Kind
from fleetplane.kernel.values.times import spelled

EVENTS_KEPT = 500
"""Of one resource, the newest: about 1 KB each."""
NAME_DIGITS = 12
"""Of a revision in a name: names then sort as the events came."""


class EventSpecView(ResourceShape, frozen=True):
    type: str
    """`KIND.STATE`, such as `board.not_ready`; as the agent names it for what an agent reported."""
    about: str
    """The object that it is about, as `resource/name`."""
    occurred_at: str
    details: Mapping[str, str]


def event_resource(**declared: Any) -> PublicResource[EventSpecView, NoStatus]:
    """A domain's part of the feed."""
    return PublicResource(
        name="event",
        plural="events",
        short=("ev",),
        summary="Something that happened to an object",
        spec=EventSpecView,
        status=NoStatus,
        columns=(
            Column(title="TYPE", value=".spec.type"),
            Column(title="ABOUT", value=".spec.about"),
            Column(title="WHEN", value=".spec.occurredAt", type="age"),
            Column(title="DETAILS", value=".spec.details"),
        ),
        search=(".spec.type", ".spec.about"),
        **declared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A change of an object whose state may be another by it."""

    member: CatalogueMember
    called: ObjectIdentity
    revision: int
    at_ns: int
    before: AnyResource | None
    after: AnyResource | None


class StateEvents:
    """The newest of each resource that has a state, oldest first."""

    def __init__(self) -> None:
        self._kept: defaultdict[str, deque[AnyResource]] = defaultdict(partial(deque, maxlen=EVENTS_KEPT))
        self._told: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<StateEvents {dict(self._told)}>"

    def members(self, members: Iterable[CatalogueMember]) -> Iterator[CatalogueMember]:
        """The feed's parts for those of these resources that have a state."""
        for member in members:
            resource = member.resource
            if resource.state is not None:
                feed = event_resource(
                    kind=_kind(resource.plural),
                    view=as_stored,
                    place=lambda made, _reading: made.scope,
                    permission=resource.permission,
                    computed=_copied(self._kept[resource.plural]),
                    observed=ObservedPart(version=self._version(resource.plural)),
                )
                yield CatalogueMember(resource=feed, domain=member.domain, running=member.running)

    def _version(self, plural: str) -> Callable[[Any], int]:
        return lambda _running: self._told[plural]

    def note(self, change: StateChange) -> None:
        """One change of one object; an event if its state is another."""
        if (made := _made(change)) is not None:
            plural = change.member.resource.plural
            self._kept[plural].append(made)
            self._told[plural] += 1

    def recalled(self, changes: Iterable[StateChange]) -> None:
        """What the log tells of the time before this server began."""
        older: dict[str, list[AnyResource]] = {}
        for change in changes:
            if (made := _made(change)) is not None:
                older.setdefault(change.member.resource.plural, []).append(made)
        for plural, found in older.items():
            kept = self._kept[plural]
            newer = tuple(kept)
            kept.clear()
            kept.extend((*found, *newer))
            self._told[plural] += 1


def _copied(kept: deque[AnyResource]) -> Callable[[Any], Sequence[AnyResource]]:
    return lambda _running: tuple(kept)


def _kind(plural: str) -> Kind[EventSpecView, NoStatus]:
    return Kind(f"state-event-of-{plural}", EventSpecView, NoStatus)


def _made(change: StateChange) -> AnyResource | None:
    resource = change.member.resource
    if resource.state is None:
        return None
    was = None if change.before is None else resource.state(change.before)
    now = ObjectState("deleted") if change.after is None else resource.state(change.after)
    if was == now:
        return None
    details = {"before": was.word if was is not None else "", "reason": now.reason}
    return made_up(
        _kind(resource.plural),
        f"{change.revision:0{NAME_DIGITS}d}",
        spec=EventSpecView(
            type=f"{resource.name}.{now.word}",
            about=f"{resource.plural}/{change.called.name}",
            occurred_at=spelled(change.at_ns),
            details={name: text for name, text in details.items() if text},
        ),
        scope=change.called.scope,
        created_at_ns=change.at_ns,
    )
