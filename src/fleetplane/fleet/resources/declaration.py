"""What a domain declares of a kind that everybody may know: the public resource.

From one declaration come the routes of `/apis/v1`, its OpenAPI document and JSON Schemas, tables, watches
and what clients offer. A resource is not the stored kind: the store may change, the API may not. Between
the two stands the view, a pure function of what is stored and of what can be read beside it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from fleetplane.fleet.figures import Figures, MeasuredSeries, Stretch
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.kernel.access import Permission
from fleetplane.kernel.resources import AnyKind, AnyResource, Condition, Kind, Resource, SpecT, StatusT
from fleetplane.kernel.store import Draft

ViewSpecT = TypeVar("ViewSpecT")
ViewStatusT = TypeVar("ViewStatusT")


class ResourceShape(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of what the API shows: fields in camelCase, times as RFC 3339 text, durations such as `90s`."""


class Secret(ResourceShape, frozen=True):
    """A field that can be written and is never shown."""

    set: bool
    """Whether there is a value."""


class ResourceVerb(StrEnum):
    """What can be done with every object of a resource."""

    GET = "get"
    LIST = "list"
    WATCH = "watch"
    EXPLAIN = "explain"
    LOGS = "logs"
    FIGURES = "figures"
    HISTORY = "history"
    PUT = "put"
    PATCH = "patch"
    DELETE = "delete"


READING = frozenset({ResourceVerb.GET, ResourceVerb.LIST, ResourceVerb.WATCH})


class ViewReader(Protocol):
    """What of the store a view may read: names of things that a record knows by their ids."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceView(Generic[ViewSpecT, ViewStatusT]):
    """What is shown of a stored resource. What is None is shown as it is stored."""

    spec: ViewSpecT
    status: ViewStatusT | None
    labels: Mapping[str, str] | None = None
    conditions: Sequence[Condition] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of the table that the command line and the console print."""

    title: str
    value: str | Callable[[Mapping[str, Any]], Any]
    """A path such as `.status.state`, or a function of the object as JSON."""
    type: str = "text"
    """`text`, `number`, or `age`: a moment, to be shown as the time since then."""
    wide: bool = False
    """Shown only where there is room, or where more is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """A link to another resource."""

    resource: str
    """Its name, such as `provider`."""
    path: str
    """Where the object says which one, such as `.status.provider`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionCall:
    """An action that a permitted caller asks for."""

    domain: Any
    """The running domain that declared the resource."""
    stored: AnyResource
    scope: str
    """Of the object, as the API spells it."""
    body: Any
    actor: str
    """The name under which to write."""
    may: Callable[[Permission], bool]
    """Whether the caller has a further permission at the object's scope."""
    switch: FreezeSwitch
    promise: Callable[[Callable[[Any], Begun | None]], str]
    """Declare that one transaction does it all, and how what it begins follows from what that returns; the
    name under which to write instead of `actor`. The answer is recorded with it, for who asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What an action that takes time began: an object to watch."""

    resource: str
    """Its plural, such as `runs`."""
    name: str
    scope: str
    """As the API spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceAction:
    """Something that is done to one object, by the function that the domain's own protocols call."""

    name: str
    summary: str
    permission: Permission
    run: Callable[[ActionCall], Awaitable[Begun | None]]
    body: type[msgspec.Struct] | None = None
    takes_time: bool = False
    """Answered with 202 and what it began, where it began anything."""
    anywhere: bool = False
    """Whether every server on a shared database does it: it needs nothing that the active one alone has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCall:
    """One object that a permitted caller wants written or deleted, in a draft that may never be committed."""

    domain: Any
    """The running domain that declared the resource."""
    draft: Draft
    scope: str
    """Where the object lies, as the API spells it."""
    name: str
    spec: Any
    """As the resource's shape has it; None for a deletion."""
    stored: AnyResource | None
    """What is there now, in the draft."""
    actor: str
    """The name under which to write."""
    may: Callable[[Permission], bool]
    """Whether the caller has a further permission at the object's scope."""
    batch: dict[str, Any]
    """For what a domain does once for all objects of a request; see `finish`."""
    finish: list[Callable[[], None]]
    """Called once everything of the request is written to the draft."""
    new_id: Callable[[], str]
    """An id for a thing that is stored under one."""


def nothing_disturbed(
    _before: AnyResource | None, _after: AnyResource | None, _reading: ViewReader
) -> Sequence[str]:
    """For objects whose changes interrupt nobody."""
    return ()


def nothing_missing(_made: AnyResource, _reading: ViewReader) -> Sequence[str]:
    """For objects that are whole as they are written."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Writable:
    """How objects of a resource are written: by the change functions of the domain's own services.

    All of them are pure functions of the draft that they are given: they are run to show what would happen,
    and to make it happen.
    """

    permission: Permission
    find: Callable[[Any, Draft, str, str], AnyResource | None]
    """From the running domain, a draft, the scope as the API spells it and the name to what is stored."""
    put: Callable[[WriteCall], AnyResource]
    """Create the object, or replace its spec; what is stored then. Of a secret that is not given anew, what
    is stored stays."""
    delete: Callable[[WriteCall], object]
    kind: AnyKind | None = None
    """Of what is computed: the stored kind that holds what people wrote of an object, at its stored scope and
    under its stored name."""
    rank: int = 0
    """Objects of a lower rank are written first: those that others refer to."""
    referred_to: bool = False
    """Whether others refer to it, so that it is deleted after they are written; else it is deleted first."""
    exported: Callable[[AnyResource], bool] = lambda _stored: True
    """Whether an export contains one; not what means nothing without a machine that has to enrol first."""
    disturbs: Callable[[AnyResource | None, AnyResource | None, ViewReader], Sequence[str]] = (
        nothing_disturbed
    )
    """What a change interrupts: from what is stored before and after, in words."""
    anywhere: bool = False
    """Whether servers that stand by write it, too: all of it depends on the draft and on settings alone, and
    whoever acts on it follows the store."""
    warns: Callable[[AnyResource, ViewReader], Sequence[str]] = nothing_missing
    """What an object still lacks once it is written, such as a key that no document carries; in words."""


class LogLine(ResourceShape, frozen=True):
    """One line of a log."""

    at: str
    level: str
    """As its source names levels; empty where it has none."""
    source: str
    """What of the object wrote it: a unit, a file, `access`."""
    message: str
    dropped: int = 0
    """How many before it are missing, since the reader was too slow for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which lines of a log."""

    tail: int
    """How many of those that are there."""
    follow: bool
    """Whether to go on with those that come."""
    level: str = ""
    """The least severity, as the source names it."""
    source: str = ""
    contains: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCall:
    """A log that a permitted caller reads."""

    domain: Any
    """The running domain that declared the resource."""
    stored: AnyResource
    query: LogQuery
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPart:
    """How what is not stored changes, so that it can be watched."""

    version: Callable[[Any], Hashable] = lambda _domain: None
    """From the running domain to something that is another whenever an object may be another; None where
    nothing tells. Of what only grows, the newest number."""
    matters: Callable[[Any], object] = lambda made: (made.labels, made.spec, made.status)
    """What of an object is worth telling: not the moment of the last heartbeat."""


def stored_name(stored: AnyResource, _reading: ViewReader) -> str:
    """The name of what is known by the name that it is stored under."""
    return stored.name


def stored_as_it_is(_domain: Any, stored: AnyResource) -> AnyResource:
    """The stored resource, for objects that no heartbeat moves."""
    return stored


class ObjectState(NamedTuple):
    """The state of an object as the event feed tells it; another one of either is an event."""

    word: str
    """One of few, such as `offline`."""
    reason: str = ""
    """Why, in words that change with their cause only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicResource(Generic[ViewSpecT, ViewStatusT]):
    """One kind of object of the API."""

    name: str
    plural: str
    summary: str
    kind: AnyKind
    """What is stored; each change of it is a change of the object."""
    spec: type[ViewSpecT]
    status: type[ViewStatusT]
    view: Callable[[Any, ViewReader], ResourceView[ViewSpecT, ViewStatusT]]
    place: Callable[[Any, ViewReader], str]
    """The scope in which an object lies, such as `/tenants/acme`."""
    permission: Permission
    """Of those who may read it."""
    named: Callable[[Any, ViewReader], str] = stored_name
    """The name of an object, unique in its scope."""
    short: tuple[str, ...] = ()
    columns: Sequence[Column] = ()
    verbs: frozenset[ResourceVerb] = READING
    actions: Sequence[ResourceAction] = ()
    relates: Sequence[Related] = ()
    explain: str = ""
    """The word by which `fleet/explain.py` knows the kind in its domain."""
    search: Sequence[str] = (".metadata.name",)
    """Paths of what a person might type to find it."""
    moves: bool = False
    """Whether an object can come to lie in another scope."""
    write: Writable | None = None
    computed: Callable[[Any], Iterable[AnyResource]] | None = None
    """Of what is not stored: everything there is, made by the running domain."""
    latest: Callable[[Any, int | None, int], Awaitable[Sequence[AnyResource]]] | None = None
    """Of what only grows and is kept on disk: so many, newest first, before a number (None: the newest), by
    the running domain. Names are the numbers."""
    logs: Callable[[LogCall], AsyncGenerator[LogLine, None]] | None = None
    """What an object writes down: the lines of its log, oldest first. With `ResourceVerb.LOGS`."""
    figures: Callable[[Any, Sequence[AnyResource]], Awaitable[Mapping[str, Figures]]] | None = None
    """The latest figures of objects of one stored scope, by their names, from the running domain. With
    `ResourceVerb.FIGURES`."""
    history: Callable[[Any, AnyResource, Stretch], Awaitable[Sequence[MeasuredSeries]]] | None = None
    """The figures of one object over time, from the running domain. With `ResourceVerb.HISTORY`."""
    observed: ObservedPart | None = None
    """Of what is not stored: how it changes; needed where it can be watched."""
    live: Callable[[Any, AnyResource], AnyResource] = stored_as_it_is
    """From the running domain and a stored resource to the resource with the moments that heartbeats move:
    they are in memory, and stored only with the next change of state. Asked for each reading."""
    state: Callable[[Any], ObjectState] | None = None
    """The state of a stored resource, whose changes are events."""
    shows: Callable[[Any], bool] = field(default=lambda _stored: True)
    """Whether a stored resource is an object of the API at all."""

    @property
    def is_stored(self) -> bool:
        """Whether its objects are resources of the store."""
        return self.computed is None and self.latest is None


AnyPublicResource = PublicResource[Any, Any]
