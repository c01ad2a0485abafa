"""Objects written to one draft: found, checked, put or deleted by their domains, and compared.

Whoever uses it decides what becomes of the draft: a dry run and a plan only look at it, a request with PUT
and an applied plan have its outcome written. Permissions are asked for each object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from fleetplane.fleet.plans import given as given_objects
from fleetplane.fleet.plans.decisions import (
    OWNER_LABEL,
    ObjectAddress,
    PlannedStep,
    PlanOperation,
    ShownPart,
    operation,
)
from fleetplane.fleet.plans.documents import Json
from fleetplane.fleet.resources import objects
from fleetplane.fleet.resources.access import Sight
from fleetplane.fleet.resources.catalogue import Catalogue, CatalogueMember, ResourceEntry
from fleetplane.fleet.resources.declaration import Writable, WriteCall
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict, FleetplaneError, InvalidArgument, NotFound
from fleetplane.kernel.resources import AnyResource, check_labels
from fleetplane.kernel.store import Draft
from fleetplane.kernel.values.ids import new_uuid
from fleetplane.web.rest.problems import ConflictBlocker, Problem


class NotWritable(FleetplaneError):
    """Objects of this resource are not written through the API."""

    grpc_code = 12
    http_status = 405
    reason = "METHOD_NOT_ALLOWED"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedObject:
    """One object as it should be, or (spec None) should not be."""

    address: ObjectAddress
    spec: Mapping[str, Any] | None
    labels: Mapping[str, str] | None = None
    """None leaves the labels as they are."""
    field: str = ""
    """Where the request has it, for errors; empty if it is the request."""
    uid: str = ""
    """Of the object that is meant, where the request says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPlace:
    """An object's address with what is declared of it, and what is there."""

    address: ObjectAddress
    entry: ResourceEntry
    member: CatalogueMember
    write: Writable
    stored: AnyResource | None


@dataclass(slots=True)
class ObjectWriter:
    """Writes objects of a catalogue to one draft for one caller."""

    catalogue: Catalogue
    draft: Draft
    sight: Sight
    actor: str
    clock: Clock
    elsewhere: Callable[[], FleetplaneError] | None = None
    """On a server that stands by: the refusal of objects that only the active one writes."""
    _batch: dict[str, dict[str, Any]] = field(default_factory=dict)
    _finish: list[Callable[[], None]] = field(default_factory=list)

    def place(self, address: ObjectAddress, *, field: str = "") -> ObjectPlace:
        """Where an object is, or would be; for those who may know."""
        entry = self.catalogue.named(address.kind)
        member = writable_member(entry)
        write = member.resource.write
        assert write is not None
        self.sight.check_touches(address.scope)
        stored = write.find(member.running, self.draft, address.scope, address.name)
        if stored is not None and not self.sight.may(member.resource.permission, address.scope):
            raise NotFound(f"there is no {address}", field=field or None)
        canonical = ObjectAddress(entry.resource.name, address.scope, address.name)
        return ObjectPlace(address=canonical, entry=entry, member=member, write=write, stored=stored)

    def put(self, wanted: WantedObject, place: ObjectPlace) -> AnyResource:
        """Create or replace one object; errors name the field of the request."""
        assert wanted.spec is not None
        self._check_here(place)
        self.sight.check_do(place.write.permission, place.address.scope)
        if wanted.uid and (place.stored is None or place.stored.uid != wanted.uid):
            raise Conflict(
                f"{place.address} is not the object with that uid: it was deleted, and perhaps made again",
                field=_join(wanted.field, "metadata.uid"),
            )
        resource = place.member.resource
        where = _join(wanted.field, "spec")
        spec = given_objects.decoded_spec(wanted.spec, resource.spec, field=where)
        with _naming(wanted.field, place.address):
            made = place.write.put(self._call(place, spec))
            made = self._labelled(made, place, wanted)
        found = objects.identity(resource, made, self.draft)
        if (found.name, found.scope) != (place.address.name, place.address.scope):
            raise InvalidArgument(
                f"the spec would make it {found.name!r} in {found.scope}",
                field=where,
                hint="name and scope are part of the address: write a new object and delete this one",
            )
        return made

    def delete(self, place: ObjectPlace, *, field: str = "") -> None:
        """Delete one object that is there."""
        if place.stored is None:
            raise NotFound(f"there is no {place.address}", field=field or None)
        self._check_here(place)
        self.sight.check_do(place.write.permission, place.address.scope)
        with _naming(field, place.address):
            place.write.delete(self._call(place, None))

    def _check_here(self, place: ObjectPlace) -> None:
        if self.elsewhere is not None and not place.write.anywhere:
            raise self.elsewhere()

    def finish(self) -> None:
        """What domains do once for everything that was written."""
        for done in self._finish:
            done()
        self._finish.clear()

    def _labelled(self, made: AnyResource, place: ObjectPlace, wanted: WantedObject) -> AnyResource:
        if wanted.labels is None or wanted.labels == made.labels:
            return made
        check_labels(wanted.labels)
        kind = place.write.kind or place.member.resource.kind
        stored = self.draft.get(kind, made.scope, made.name)
        assert stored is not None, "it was put"
        labelled = self.draft.put(
            kind,
            stored.scope,
            stored.name,
            spec=stored.spec,
            status=stored.status,
            conditions=stored.conditions,
            labels=wanted.labels,
        )
        if place.write.kind is None:
            return labelled
        found = self.place(place.address).stored
        assert found is not None, "it was put"
        return found

    def _call(self, place: ObjectPlace, spec: Any) -> WriteCall:
        scope = place.address.scope

        def may(permission: Permission) -> bool:
            return self.sight.may(permission, scope)

        return WriteCall(
            domain=place.member.running,
            draft=self.draft,
            scope=scope,
            name=place.address.name,
            spec=spec,
            stored=place.stored,
            actor=self.actor,
            may=may,
            batch=self._batch.setdefault(place.member.domain, {}),
            finish=self._finish,
            new_id=lambda: new_uuid(self.clock),
        )

    # Looking.

    def shown(self, place: ObjectPlace, stored: AnyResource | None) -> ShownPart | None:
        """The part of an object that says what should be, as the draft has it."""
        if stored is None:
            return None
        found = objects.shown(place.member.resource, stored, self.draft)
        # As JSON has it, so that what was stored compares with what is made now.
        spec = msgspec.json.decode(msgspec.json.encode(found["spec"]))
        return ShownPart(labels=dict(stored.labels), spec=cast("dict[str, Json]", spec))

    def step(
        self,
        place: ObjectPlace,
        before: ShownPart | None,
        made: AnyResource | None,
        *,
        warnings: tuple[str, ...] = (),
        pruned: bool = False,
    ) -> PlannedStep:
        """What was done to one object, with what it disturbs."""
        what, changes = operation(before, self.shown(place, made))
        disturbed = (
            tuple(place.write.disturbs(place.stored, made, self.draft))
            if what is not PlanOperation.NOTHING
            else ()
        )
        lacking = () if made is None else tuple(place.write.warns(made, self.draft))
        kind, scope, name = place.address
        return PlannedStep(
            operation=what,
            kind=kind,
            scope=scope,
            name=name,
            changes=changes,
            disturbs=disturbed,
            warnings=(*warnings, *lacking),
            pruned=pruned,
        )


def writable_member(entry: ResourceEntry) -> CatalogueMember:
    """The domain that writes objects of a resource; raises where none does."""
    for member in entry.members:
        if member.resource.write is not None:
            return member
    raise NotWritable(
        f"objects of {entry.resource.plural} are not written through the API",
        hint="GET /apis/v1 lists the verbs of each resource",
    )


def owner_of(stored: AnyResource | None) -> str:
    """Which owner's plan wrote an object; empty if none did."""
    return stored.labels.get(OWNER_LABEL, "") if stored is not None else ""


def _join(field: str, rest: str) -> str:
    return f"{field}.{rest}" if field else rest


class _naming:  # noqa: N801 -- reads as a statement
    """Errors of a domain, with the object that they are about and where the request has it."""

    def __init__(self, field: str, address: ObjectAddress) -> None:
        self._field = field
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ConflictBlocker):
            raise ConflictBlocker(
                f"{self._address}: {error.message}",
                (
                    Problem(field=_join(self._field, f"spec.{one.field}"), message=one.message, code=one.code)
                    for one in error.problems
                ),
            ) from error
        if isinstance(error, InvalidArgument):
            raise given_objects.under(error, _join(self._field, "spec")) from error
        if isinstance(error, FleetplaneError) and self._field:
            error.field = f"{self._field}.spec.{error.field}" if error.field else self._field
            error.message = f"{self._address}: {error.message}"
