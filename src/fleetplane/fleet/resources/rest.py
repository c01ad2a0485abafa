"""`/apis/v1`: every public resource, by one set of routes for each.

    GET  /apis/v1                                  discovery, with what the caller may do
    GET  /apis/v1/gpus                             list: scope, limit, continue, labels, fields, sort
    GET  /apis/v1/gpus/NAME                        one object, with its ETag
    GET  /apis/v1/table/gpus                       the list as a table
    GET  /apis/v1/watch?of=gpus,edge-nodes         changes, as server-sent events
    GET  /apis/v1/gpus/NAME/explain                why an object is as it is
    GET  /apis/v1/boards/NAME/logs                 what an object writes down, as server-sent events
    GET  /apis/v1/figures/boards                   what was measured of objects lately
    GET  /apis/v1/boards/NAME/figures              what was measured of one object over time
    POST /apis/v1/groups/NAME/actions/scale        something that is done to one object

A scope is a parameter of the query, or stands in the path before the resource: see `web/apis/scope_paths.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from fleetplane.fleet.explain import FleetExplanations
from fleetplane.fleet.freeze import FreezeSwitch
from fleetplane.fleet.resources import (
    acting,
    discovery,
    latest,
    listing,
    observing,
    scopes,
    selection,
    tables,
)
from fleetplane.fleet.resources.access import ApiDoor, Sight
from fleetplane.fleet.resources.acting import ActionAnswer, ObjectExplanation
from fleetplane.fleet.resources.catalogue import Catalogue, FoundObject, ResourceEntry
from fleetplane.fleet.resources.declaration import ResourceAction, ResourceVerb
from fleetplane.fleet.resources.discovery import Discovery
from fleetplane.fleet.resources.tables import Table
from fleetplane.fleet.resources.watching import Watching, WatchQuery, parsed_of
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.web.rest.gate import PrincipalCaller
from fleetplane.web.rest.pages import flag, whole_number
from fleetplane.web.rest.routes import Answer, Call, Query, Route, RouteGroup, RouteTable, Stream, etag
from fleetplane.web.streaming import EVENT_STREAM

_WATCH = RouteGroup("Watch")

_DISCOVERY = RouteGroup("Discovery")

PREFIX = "/apis/v1"
ApiCall = Call[PrincipalCaller]
Handler = Callable[[ApiCall], Awaitable[Answer[Any]]]
H = TypeVar("H", bound=Callable[..., Any])

SCOPE = Query(name="scope", summary="At and below which scope, such as /tenants/acme; / if not given")
LIST_QUERY: Sequence[Query] = (
    SCOPE,
    Query(
        name="limit",
        summary="Objects of a page",
        kind="integer",
        default=listing.LIMIT,
        low=1,
        high=listing.LIMIT_MOST,
    ),
    Query(name="continue", summary="`continue` of the page before"),
    Query(name="labels", summary="A selector of labels, such as role=web,env!=test"),
    Query(name="fields", summary="Requirements of fields, such as status.state=connected"),
    Query(name="sort", summary="Paths, most important first; with - before one, descending"),
)

FIGURES_QUERY = tuple(one for one in LIST_QUERY if one.name in ("scope", "labels", "fields"))
FORMS = ("object", "table", "full")
WATCH_QUERY: Sequence[Query] = (
    Query(name="of", summary="Resources, with or without scopes: gpus,instances@/tenants/acme; * for all"),
    Query(
        name="after",
        summary="Go on after this revision; without it, begin with what there is",
        kind="integer",
    ),
    Query(name="labels", summary="A selector of labels, such as role=web,env!=test"),
    Query(name="fields", summary="Requirements of fields, such as status.state=connected"),
    Query(
        name="form", summary="Whole objects, rows of their tables, or both", choices=FORMS, default=FORMS[0]
    ),
    Query(name="measured", summary="Tell also when figures or lines of logs have come", kind="boolean"),
)
REVISION_DIGITS = 18
"""Of the largest number that the store has."""


class ResourceRoutes:
    """Answers about every resource of a catalogue."""

    def __init__(
        self,
        store: Store,
        catalogue: Catalogue,
        door: ApiDoor,
        watching: Watching,
        *,
        clock: Clock,
        explanations: FleetExplanations,
        switch: FreezeSwitch,
    ) -> None:
        self._clock = clock
        self._explanations = explanations
        self._switch = switch
        self._store = store
        self._watching = watching
        self.catalogue = catalogue
        self._door = door
        self._logs = observing.LogStreams()

    def __repr__(self) -> str:
        return f"<ResourceRoutes {self.catalogue!r}>"

    def table(self, more: Sequence[Route] = ()) -> RouteTable:
        """Every route, those of other parts of the API among them."""
        routes = [
            _DISCOVERY.get("/", self.discover),
            _WATCH.get("/watch", self.watch, streams=True, query=WATCH_QUERY),
            *more,
        ]
        for entry in self.catalogue.entries:
            routes += self._routes(entry)
        return RouteTable(PREFIX, routes, strict_queries=True)

    def _routes(self, entry: ResourceEntry) -> Iterator[Route]:
        resource = entry.resource
        about = {"tag": resource.plural, "permission": resource.permission}
        yield Route(
            method="GET",
            path=f"/{resource.plural}",
            handler=_named(f"list_{_word(resource.plural)}", self._lister(entry)),
            needs=Needs.STORE,
            summary=f"List {resource.plural}, at and below a scope",
            answer=entry.list_type,
            query=LIST_QUERY,
            **about,  # type: ignore[arg-type]
        )
        yield Route(
            method="GET",
            path=f"/table/{resource.plural}",
            handler=_named(f"table_{_word(resource.plural)}", self._tabler(entry)),
            needs=Needs.STORE,
            summary=f"List {resource.plural} as a table",
            answer=Table,
            query=LIST_QUERY,
            **about,  # type: ignore[arg-type]
        )
        if ResourceVerb.GET in resource.verbs:
            yield Route(
                method="GET",
                path=f"/{resource.plural}/{{name}}",
                handler=_named(f"get_{_word(resource.name)}", self._getter(entry)),
                needs=Needs.STORE,
                summary=f"Read one object of {resource.plural}",
                answer=entry.object_type,
                query=(SCOPE,),
                **about,  # type: ignore[arg-type]
            )
        if ResourceVerb.EXPLAIN in resource.verbs:
            yield Route(
                method="GET",
                path=f"/{resource.plural}/{{name}}/explain",
                handler=_named(f"explain_{_word(resource.name)}", self._explainer(entry)),
                needs=Needs.STORE,
                summary=f"Why one object of {resource.plural} is as it is",
                answer=ObjectExplanation,
                query=(SCOPE,),
                **about,  # type: ignore[arg-type]
            )
        yield from self._observing_routes(entry)
        for action in entry.actions.values():
            yield self._action_route(entry, action)

    def _observing_routes(self, entry: ResourceEntry) -> Iterator[Route]:
        resource = entry.resource
        about = {"tag": resource.plural, "permission": resource.permission}
        if ResourceVerb.LOGS in resource.verbs:
            yield Route(
                method="GET",
                path=f"/{resource.plural}/{{name}}/logs",
                handler=_named(f"logs_{_word(resource.name)}", self._log_reader(entry)),
                needs=Needs.STORE,
                summary=f"Read or follow the log of one object of {resource.plural}, as server-sent events",
                streams=True,
                query=(SCOPE, *observing.LOG_QUERY),
                **about,  # type: ignore[arg-type]
            )
        if ResourceVerb.FIGURES in resource.verbs:
            yield Route(
                method="GET",
                path=f"/figures/{resource.plural}",
                handler=_named(f"figures_{_word(resource.plural)}", self._figurer(entry)),
                needs=Needs.STORE,
                summary=f"What was measured of {resource.plural} lately",
                answer=observing.FigureList,
                query=FIGURES_QUERY,
                **about,  # type: ignore[arg-type]
            )

        if ResourceVerb.HISTORY in resource.verbs:
            yield Route(
                method="GET",
                path=f"/{resource.plural}/{{name}}/figures",
                handler=_named(f"history_{_word(resource.name)}", self._historian(entry)),
                summary=f"What was measured of one object of {resource.plural} over time",
                answer=observing.FigureHistory,
                query=(SCOPE, *observing.HISTORY_QUERY),
                **about,  # type: ignore[arg-type]
            )

    def _action_route(self, entry: ResourceEntry, action: ResourceAction) -> Route:
        resource = entry.resource

        async def handle(call: ApiCall) -> Answer[ActionAnswer]:
            found, body = await self.find(entry, call), _body(action, call)
            return await acting.act(
                action.name, found, body, request=call, sight=self.sight(call), switch=self._switch
            )

        def recheck(call: ApiCall) -> None:
            """Before a kept answer is repeated: rights may have been taken away meanwhile."""
            scope = scopes.parsed(call.query.get("scope", ""))
            self.sight(call).check_list((action.permission,), scope)

        return Route(
            method="POST",
            path=f"/{resource.plural}/{{name}}/actions/{action.name}",
            needs=Needs.WRITES if action.anywhere else Needs.ACTIVE,
            handler=_named(f"{_word(action.name)}_{_word(resource.name)}", handle),
            tag=resource.plural,
            permission=action.permission,
            summary=action.summary,
            body=action.body,
            body_optional=action.body is not None and _has_defaults(action.body),
            answer=ActionAnswer,
            status=202 if action.takes_time else 200,
            query=(SCOPE,),
            recheck=recheck,
        )

    async def discover(self, call: ApiCall) -> Answer[Discovery]:
        """List the resources, and what the caller may do with each."""
        return Answer(content=discovery.discovered(self.catalogue, self.sight(call), self._store.revision))

    async def watch(self, call: ApiCall) -> Stream:
        """Follow the changes of any set of resources, as server-sent events."""
        wanted = parsed_of(call.query.get("of", ""), self.catalogue, self.sight(call))
        form = call.query.get("form", FORMS[0])
        if form not in FORMS:
            raise InvalidArgument(f"must be one of {', '.join(FORMS)}", field="form")
        query = WatchQuery(
            wanted=wanted,
            selection=selection.selection(call.query),
            after=_after(call),
            as_table=form != "object",
            with_objects=form == "full",
            measured=flag(call, "measured") or False,
        )
        self._watching.check_room(call.caller.name)

        def look() -> Sight:
            return Sight(self._door, self._door.authenticate(call.headers))

        chunks = self._watching.stream(query, call.caller.name, look)
        return Stream(chunks=chunks, content_type=EVENT_STREAM)

    # Reading.

    def sight(self, call: ApiCall) -> Sight:
        """What the caller of a request may see."""
        return Sight(self._door, call.caller)

    def _lister(self, entry: ResourceEntry) -> Handler:
        async def handle(call: ApiCall) -> Answer[Any]:
            page = await self.page(entry, call)
            if tables.CONTENT_TYPE in (call.headers.get("accept") or ""):
                return _table(entry, page)
            return Answer(
                content={
                    "kind": f"{entry.resource.name}-list",
                    "items": page.items,
                    "revision": page.revision,
                    "continue": page.following,
                }
            )

        return handle

    def _tabler(self, entry: ResourceEntry) -> Handler:
        async def handle(call: ApiCall) -> Answer[Any]:
            return _table(entry, await self.page(entry, call))

        return handle

    async def page(self, entry: ResourceEntry, call: ApiCall) -> listing.ObjectPage:
        """The page that a request asks for."""
        limit = whole_number(call, "limit", default=listing.LIMIT, low=1, high=listing.LIMIT_MOST)
        query = listing.list_query(call.query, entry.resource.plural, limit=limit)
        if entry.resource.latest is not None:
            return await latest.page(entry, self._store, self._store.revision, query, self.sight(call))
        return await listing.page(entry, self._store, self._store.revision, query, self.sight(call))

    def _getter(self, entry: ResourceEntry) -> Handler:
        async def handle(call: ApiCall) -> Answer[Any]:
            found = await self.find(entry, call)
            return Answer(content=found.shown(self._store), headers={"etag": etag(found.stored)})

        return handle

    def _explainer(self, entry: ResourceEntry) -> Handler:
        async def handle(call: ApiCall) -> Answer[ObjectExplanation]:
            return Answer(content=acting.explained(await self.find(entry, call), self._explanations))

        return handle

    def _log_reader(self, entry: ResourceEntry) -> Callable[[ApiCall], Awaitable[Stream]]:
        async def handle(call: ApiCall) -> Stream:
            found = observing.readable(await self.find(entry, call))
            query = observing.log_query(call)
            self._logs.check_room(call.caller.name)

            def look() -> Sight:
                return Sight(self._door, self._door.authenticate(call.headers))

            return Stream(chunks=self._logs.stream(found, query, look), content_type=EVENT_STREAM)

        return handle

    def _figurer(self, entry: ResourceEntry) -> Handler:
        async def handle(call: ApiCall) -> Answer[observing.FigureList]:
            scope, chosen = scopes.parsed(call.query.get("scope", "")), selection.selection(call.query)
            return Answer(
                content=await observing.figures(entry, self._store, scope, chosen, self.sight(call))
            )

        return handle

    def _historian(self, entry: ResourceEntry) -> Handler:
        async def handle(call: ApiCall) -> Answer[observing.FigureHistory]:
            asked = observing.stretch(call, self._clock.now_ns())
            return Answer(content=await observing.history(await self.find(entry, call), asked))

        return handle

    async def find(self, entry: ResourceEntry, call: ApiCall) -> FoundObject:
        """The object that a path names, if the caller may know of it."""
        for member in entry.members:  # an acknowledged write is seen
            if member.resource.is_stored:
                await self._store.settled(member.resource.kind)
        scope = scopes.parsed(call.query.get("scope", ""))
        if entry.resource.latest is not None:
            return await latest.find(entry, self._store, call.path["name"], scope, self.sight(call))
        return entry.find(self._store, call.path["name"], scope, self.sight(call))


def _table(entry: ResourceEntry, page: listing.ObjectPage) -> Answer[Table]:
    return Answer(content=tables.table(entry.resource, page), headers={"content-type": tables.CONTENT_TYPE})


def _after(call: ApiCall) -> int | None:
    """Where a watch goes on: as a browser says that reconnects by itself, or as the query says."""
    field, text = "last-event-id", call.headers.get("last-event-id")
    if not text:
        field, text = "after", call.query.get("after")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > REVISION_DIGITS:
        raise InvalidArgument("is no revision", field=field, hint="give the id of the last event")
    return int(text)


def _named(name: str, handler: H) -> H:
    """With the name that its operation has in the document."""
    handler.__qualname__ = name
    return handler


def _body(action: ResourceAction, call: ApiCall) -> msgspec.Struct | None:
    """What an action takes; what was left out has its defaults."""
    if call.body is None and action.body is not None:
        return action.body()
    body: msgspec.Struct | None = call.body
    return body


def _has_defaults(body: type[msgspec.Struct]) -> bool:
    """Whether a body may be left out: every field of it has a default."""
    return not any(one.required for one in msgspec.structs.fields(body))


def _word(name: str) -> str:
    return name.replace("-", "_")
