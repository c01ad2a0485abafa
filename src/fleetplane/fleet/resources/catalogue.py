"""Every resource of the running domains, by the names that callers use.

Several domains may declare the same resource, such as `run`: same shapes, each with its own stored kind.
To callers it is one. Each stored kind belongs to one resource: a revision is one change of one object.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from fleetplane.fleet.resources import objects, scopes
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.declaration import (
    AnyPublicResource,
    ResourceAction,
    ResourceVerb,
    ViewReader,
    stored_name,
)
from fleetplane.fleet.resources.objects import ObjectIdentity
from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import Conflict, NotFound, SettingsError
from fleetplane.kernel.resources import AnyKind, AnyResource

RESERVED = frozenset({"export", "figures", "openapi.json", "plans", "schemas", "scopes", "table", "watch"})
"""Words that paths below `/apis/v1` have for something else."""


NAME_SHOWN = 80
"""Characters of a name that are repeated in an error."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueMember:
    """A resource as one domain declares it."""

    resource: AnyPublicResource
    domain: str
    running: Any
    """The running domain, for its actions."""

    def shown(self, stored: AnyResource, called: ObjectIdentity, reading: ViewReader) -> dict[str, Any]:
        """An object in plain values, with what is known live."""
        live = self.resource.live(self.running, stored)
        return objects.shown(self.resource, live, reading, called=called)

    def listed(self, reading: ViewReader) -> Sequence[AnyResource]:
        """Every stored resource, or every one that the domain makes up."""
        if self.resource.latest is not None:
            return ()  # never all at once
        if self.resource.computed is not None:
            return tuple(self.resource.computed(self.running))
        return reading.list(self.resource.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundObject:
    """One object, found."""

    member: CatalogueMember
    stored: AnyResource
    called: ObjectIdentity

    def shown(self, reading: ViewReader) -> dict[str, Any]:
        """The object in plain values."""
        return self.member.shown(self.stored, self.called, reading)


class ResourceEntry:
    """One resource, with every domain that has objects of it."""

    def __init__(self, members: Sequence[CatalogueMember]) -> None:
        self.members = tuple(members)
        self.resource = members[0].resource
        for other in members[1:]:
            _check_same(self.resource, other.resource)

    def __repr__(self) -> str:
        return f"<Entry {self.resource.plural} {' '.join(one.domain for one in self.members)}>"

    @cached_property
    def object_type(self) -> type[msgspec.Struct]:
        return objects.object_type(self.resource)

    @cached_property
    def list_type(self) -> type[msgspec.Struct]:
        return objects.list_type(self.resource, self.object_type)

    @cached_property
    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of its objects, as editors take it."""
        return {"$schema": DIALECT, **msgspec.json.schema(self.object_type)}

    @property
    def permissions(self) -> frozenset[Permission]:
        """Of those who may read objects of it, one for each domain."""
        return frozenset(one.resource.permission for one in self.members)

    @property
    def actions(self) -> Mapping[str, ResourceAction]:
        """By name; domains that declare the same resource declare different actions or the same shape."""
        return {action.name: action for one in self.members for action in one.resource.actions}

    def find(self, reading: ViewReader, name: str, scope: str, sight: Sight) -> FoundObject:
        """An object at or below a scope that the caller may read.

        Raises `NotFound`, and `Conflict` where several have the name and none lies at the scope itself.
        """
        sight.check_list(self.permissions, scope)
        found = [
            one
            for one in self._called(reading, name)
            if scopes.covers(scope, one.called.scope)
            and sight.may(one.member.resource.permission, one.called.scope)
        ]
        if not found:
            raise NotFound(f"there is no {self.resource.name} {name[:NAME_SHOWN]!r} at {scope}")
        exact = [one for one in found if one.called.scope == scope] or found
        if len(exact) > 1:
            places = ", ".join(sorted({one.called.scope for one in exact})[:5])
            raise Conflict(
                f"{len(exact)} objects of {self.resource.plural} are called {name[:NAME_SHOWN]!r}",
                field="scope",
                hint=f"name the scope of the one you mean: {places}",
            )
        return exact[0]

    def _called(self, reading: ViewReader, name: str) -> Iterator[FoundObject]:
        for member in self.members:
            resource = member.resource
            for stored in member.listed(reading):
                called = stored.name if resource.named is stored_name else resource.named(stored, reading)
                if name in (called, stored.uid) and resource.shows(stored):
                    yield FoundObject(
                        member=member,
                        stored=stored,
                        called=ObjectIdentity(name=called, scope=resource.place(stored, reading)),
                    )

    def all(self, reading: ViewReader) -> Iterator[FoundObject]:
        """Every object that there is at the call, by domain, stored scope and name."""
        return self._all(reading, [(one, one.listed(reading)) for one in self.members])

    def _all(
        self, reading: ViewReader, captured: Sequence[tuple[CatalogueMember, Sequence[AnyResource]]]
    ) -> Iterator[FoundObject]:
        for member, resources in captured:
            for stored in resources:
                if member.resource.shows(stored):
                    called = objects.identity(member.resource, stored, reading)
                    yield FoundObject(member=member, stored=stored, called=called)


class Catalogue:
    """Finds resources by plural, name or short name."""

    def __init__(self, members: Iterable[CatalogueMember]) -> None:
        by_name: dict[str, list[CatalogueMember]] = {}
        for member in members:
            by_name.setdefault(member.resource.name, []).append(member)
        self.entries = tuple(ResourceEntry(by_name[name]) for name in sorted(by_name))
        self.by_plural = {entry.resource.plural: entry for entry in self.entries}
        self._by_word: dict[str, ResourceEntry] = {}
        self.by_kind: dict[str, tuple[ResourceEntry, CatalogueMember]] = {}
        self.written_as: dict[str, tuple[ResourceEntry, CatalogueMember]] = {}
        """By the stored kinds that people write: of what is computed, too."""
        for entry in self.entries:
            self._add(entry)

    def __repr__(self) -> str:
        return f"<Catalogue {' '.join(self.by_plural)}>"

    def _add(self, entry: ResourceEntry) -> None:
        resource = entry.resource
        for word in dict.fromkeys((resource.plural, resource.name, *resource.short)):
            if word in RESERVED:
                raise SettingsError(f"no resource can be called {word!r}: a path of the API has that name")
            if self._by_word.setdefault(word, entry) is not entry:
                raise SettingsError(f"two resources are called {word!r}")
        for member in entry.members:
            kind = member.resource.kind.name
            write = member.resource.write
            if member.resource.is_stored:
                self.written_as[kind] = entry, member
            elif write is not None and write.kind is not None:
                self.written_as[write.kind.name] = entry, member
            if not member.resource.is_stored:
                if ResourceVerb.WATCH in member.resource.verbs and member.resource.observed is None:
                    raise SettingsError(f"{resource.plural} are not stored, and nothing says how they change")
                continue
            if self.by_kind.setdefault(kind, (entry, member))[1] is not member:
                raise SettingsError(f"two resources show the stored kind {kind!r}")

    @property
    def kinds(self) -> Sequence[AnyKind]:
        """Every stored kind that is shown."""
        return [
            member.resource.kind
            for entry in self.entries
            for member in entry.members
            if member.resource.is_stored
        ]

    def named(self, word: str) -> ResourceEntry:
        """By plural, name or short name; raises `NotFound` with the nearest that there are."""
        found = self._by_word.get(word)
        if found is None:
            near = sorted(difflib.get_close_matches(word[:64], self._by_word, n=3))
            hint = f"did you mean {', '.join(near)}?" if near else "GET /apis/v1 lists the resources"
            raise NotFound(f"there is no resource {word[:64]!r}", hint=hint)
        return found


def _check_same(one: AnyPublicResource, other: AnyPublicResource) -> None:
    same = ("plural", "short", "spec", "status", "columns", "verbs", "search", "relates")
    different = [name for name in same if getattr(one, name) != getattr(other, name)]
    if different:
        raise SettingsError(f"two domains declare {one.name!r} differently: {', '.join(different)}")
