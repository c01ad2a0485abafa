"""PUT, PATCH and DELETE of objects of the resource API, their dry runs (`dryRun=1`) and preconditions.

| The object | If-Match | Then |
|---|---|---|
| is there | names its ETag, or is `*` | goes on |
| is there | names another | 412 |
| is there | is missing, and the request replaces or patches | 428: say what you have seen |
| is not there | is given | 412 |
| is there | `If-None-Match: *` | 412 |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from fleetplane.fleet.plans import given as given_objects
from fleetplane.fleet.plans.decisions import ObjectAddress
from fleetplane.fleet.plans.given import GivenObject, GivenPatch
from fleetplane.fleet.plans.rehearsal import Rehearsal, Written, carried_out, rehearsed
from fleetplane.fleet.plans.writer import ObjectPlace, ObjectWriter, WantedObject
from fleetplane.fleet.resources import objects, scopes
from fleetplane.fleet.resources.access import ApiDoor, Sight
from fleetplane.fleet.resources.catalogue import Catalogue, ResourceEntry
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, PreconditionFailed
from fleetplane.kernel.resources import AnyResource
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.web.rest.gate import PrincipalCaller
from fleetplane.web.rest.routes import (
    Answer,
    Call,
    Headers,
    Query,
    Route,
    etag,
    is_of_another_lineage,
    matches,
)


class PreconditionRequired(FailedPrecondition):
    """The request would overwrite something without saying which version of it was seen."""

    http_status = 428
    reason = "PRECONDITION_REQUIRED"
    hint = (
        "send If-Match with the ETag of the object as you have read it, or * to overwrite whatever is there"
    )


def check(headers: Headers, present: AnyResource | None, *, overwrites: bool) -> None:
    """Refuse a request whose conditions do not hold; `overwrites`: it needs one if the object is there."""
    wanted, unwanted = headers.get("if-match"), headers.get("if-none-match")
    if unwanted is not None and present is not None and unwanted.strip() in ("*", etag(present)):
        raise PreconditionFailed("the object is there already", field="If-None-Match")
    if present is None:
        if wanted is not None:
            raise PreconditionFailed("the object is not there", field="If-Match")
        return
    if wanted is None:
        if overwrites:
            raise PreconditionRequired("the object is there already", field="If-Match")
        return
    if not matches(wanted, present):
        lost = " it was lost before a backup was restored" if is_of_another_lineage(wanted, present) else ""
        raise PreconditionFailed(f"If-Match names another version than the present one;{lost}".rstrip(";"))


ApiCall = Call[PrincipalCaller]
R = TypeVar("R")
CREATED, NO_CONTENT = 201, 204
SCOPE = Query(name="scope", summary="Where the object lies, such as /tenants/acme; / if not given")
DRY_RUN = Query(name="dryRun", summary="1: answer as if, and write nothing", choices=("0", "1"), default="0")
Change = Callable[[Rehearsal], Awaitable[Callable[[Written], R]]]


class WritingRoutes:
    """Writes single objects of every resource that can be written."""

    def __init__(self, store: Store, clock: Clock, catalogue: Catalogue, door: ApiDoor) -> None:
        self._store = store
        self._clock = clock
        self._catalogue = catalogue
        self._door = door

    def __repr__(self) -> str:
        return f"<WritingRoutes {self._catalogue!r}>"

    def routes(self) -> Iterator[Route]:
        """Three for each resource that can be written."""
        for entry in self._catalogue.entries:
            if any(member.resource.write is not None for member in entry.members):
                yield from self._of(entry)

    def _of(self, entry: ResourceEntry) -> Iterator[Route]:
        resource = entry.resource
        write = next(one.resource.write for one in entry.members if one.resource.write is not None)
        word = resource.name.replace("-", "_")
        about: dict[str, Any] = {
            "path": f"/{resource.plural}/{{name}}",
            "tag": resource.plural,
            "permission": write.permission,
            "query": (SCOPE, DRY_RUN),
            "needs": Needs.WRITES if write.anywhere else Needs.ACTIVE,
        }
        yield Route(
            method="PUT",
            handler=_named(f"put_{word}", self._putter(entry)),
            summary=f"Create or replace one object of {resource.plural}",
            body=GivenObject,
            answer=entry.object_type,
            **about,
        )
        yield Route(
            method="PATCH",
            handler=_named(f"patch_{word}", self._patcher(entry)),
            summary=f"Change one object of {resource.plural} by a merge patch",
            body=GivenPatch,
            answer=entry.object_type,
            **about,
        )
        yield Route(
            method="DELETE",
            handler=_named(f"delete_{word}", self._deleter(entry)),
            summary=f"Delete one object of {resource.plural}",
            answer=None,
            status=NO_CONTENT,
            **about,
        )

    # Putting.

    def _putter(self, entry: ResourceEntry) -> Callable[[ApiCall], Awaitable[Answer[Any]]]:
        async def handle(call: ApiCall) -> Answer[Any]:
            body: GivenObject = call.body
            wanted = WantedObject(
                address=_address(entry, call, body),
                spec=body.spec,
                labels=body.metadata.labels,
                uid=body.metadata.uid,
            )

            async def change(rehearsal: Rehearsal) -> Callable[[Written], Answer[Any]]:
                writer = self._writer(rehearsal, call)
                place = writer.place(wanted.address)
                check(call.headers, place.stored, overwrites=True)
                return _written(writer, place, wanted)

            return await self._done(call, change, action=f"{entry.resource.name}.put")

        return handle

    def _patcher(self, entry: ResourceEntry) -> Callable[[ApiCall], Awaitable[Answer[Any]]]:
        async def handle(call: ApiCall) -> Answer[Any]:
            address = await self._found(entry, call)

            async def change(rehearsal: Rehearsal) -> Callable[[Written], Answer[Any]]:
                writer = self._writer(rehearsal, call)
                place = writer.place(address)
                check(call.headers, place.stored, overwrites=True)
                before = writer.shown(place, place.stored)
                assert before is not None, "it was found"
                labels, spec = given_objects.patched(before.labels, before.spec, call.body)
                return _written(writer, place, WantedObject(address=address, spec=spec, labels=labels))

            return await self._done(call, change, action=f"{entry.resource.name}.patch")

        return handle

    def _deleter(self, entry: ResourceEntry) -> Callable[[ApiCall], Awaitable[Answer[Any]]]:
        async def handle(call: ApiCall) -> Answer[Any]:
            address = await self._found(entry, call)

            async def change(rehearsal: Rehearsal) -> Callable[[Written], Answer[Any]]:
                writer = self._writer(rehearsal, call)
                place = writer.place(address)
                check(call.headers, place.stored, overwrites=False)
                writer.delete(place)
                writer.finish()
                return lambda _: Answer(content=None)

            return await self._done(call, change, action=f"{entry.resource.name}.delete")

        return handle

    async def _found(self, entry: ResourceEntry, call: ApiCall) -> ObjectAddress:
        """The object that a path names, at or below the scope of the query, as GET finds it."""
        for member in entry.members:
            write = member.resource.write
            kept_as = write.kind if write is not None else None
            if kept_as is not None or member.resource.is_stored:
                await self._store.settled(kept_as or member.resource.kind)
        scope = scopes.parsed(call.query.get("scope", ""))
        found = entry.find(self._store, call.path["name"], scope, Sight(self._door, call.caller))
        return ObjectAddress(entry.resource.name, found.called.scope, found.called.name)

    def _writer(self, rehearsal: Rehearsal, call: ApiCall) -> ObjectWriter:
        # The caller's rights are asked anew for each try.
        return ObjectWriter(
            self._catalogue,
            rehearsal.draft,
            Sight(self._door, call.caller),
            actor=call.caller.name,
            clock=self._clock,
            elsewhere=self._store.elsewhere,
        )

    async def _done(self, call: ApiCall, change: Change[Answer[Any]], *, action: str) -> Answer[Any]:
        if is_dry_run(call):

            async def only_look(rehearsal: Rehearsal) -> Answer[Any]:
                return (await change(rehearsal))({})

            return await rehearsed(self._store, self._clock, only_look)
        done = await carried_out(
            self._store, self._clock, change, actor=call.signed(call.caller.name), action=action
        )
        return done.value


def is_dry_run(call: ApiCall) -> bool:
    """Whether a request asks only what would be."""
    given = call.query.get("dryRun", "0")
    if given not in ("0", "1"):
        raise InvalidArgument("is 1 or 0", field="dryRun")
    return given == "1"


def _address(entry: ResourceEntry, call: ApiCall, body: GivenObject) -> ObjectAddress:
    """From path, query and body, which must not contradict each other."""
    name, said = call.path["name"], body.metadata
    if body.kind not in ("", entry.resource.name):
        raise InvalidArgument(f"is {body.kind!r}; the path names a {entry.resource.name}", field="kind")
    if said.name not in ("", name):
        raise InvalidArgument(f"is {said.name!r}; the path names {name!r}", field="metadata.name")
    asked = call.query.get("scope")
    scope = scopes.parsed(said.scope if asked is None else asked)
    if said.scope and scopes.parsed(said.scope, field="metadata.scope") != scope:
        raise InvalidArgument(f"is {said.scope!r}; the request names {scope}", field="metadata.scope")
    return ObjectAddress(entry.resource.name, scope, name)


def _written(
    writer: ObjectWriter, place: ObjectPlace, wanted: WantedObject
) -> Callable[[Written], Answer[Any]]:
    made = writer.put(wanted, place)
    writer.finish()

    def answer(written: Written) -> Answer[Any]:
        final: AnyResource = written.get(made.key, made)
        content = objects.shown(place.member.resource, final, writer.draft)
        status = CREATED if place.stored is None else None
        return Answer(content=content, headers={"etag": etag(final)}, status=status)

    return answer


def _named(
    name: str, handler: Callable[[ApiCall], Awaitable[Answer[Any]]]
) -> Callable[[ApiCall], Awaitable[Answer[Any]]]:
    """With the name that its operation has in the document."""
    handler.__qualname__ = name
    return handler
