"""The resource API for programs without an event loop; the same names as in `fleetplane.client.aio`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from fleetplane.client import requests, watches
from fleetplane.client.calls import Request, Response, page_of
from fleetplane.client.objects import Change, Expectation, Listing, Object
from fleetplane.client.places import Endpoint, Place, resolve
from fleetplane.client.requests import Plan, Query
from fleetplane.client.transport import Transport
from fleetplane.client.watches import EventReader, LogLine, LogReader, Watch
from fleetplane.kernel.errors import NotFound, Unavailable


def connect(place: Place | None = None, **said: Any) -> Fleet:
    """The server that is meant: `connect()` is the current context, as on the command line.

    `connect(context="prod")`, `connect(server="https://fleet.example", token="…", ca=Path("ca.pem"))` and
    `connect(data_dir=Path("/var/lib/fleetplane"))` say which one; see `Place`. Nothing is sent yet.
    """
    return Fleet(resolve(place if place is not None else Place(**said)))


class Fleet:
    """A server's resources; a context manager. `fleet.gpus` is `fleet.resource("gpus")`."""

    def __init__(self, endpoint: Endpoint, *, transport: Transport | None = None) -> None:
        self.endpoint = endpoint
        self._transport = transport or Transport(endpoint)

    def __repr__(self) -> str:
        return f"<Fleet {self.endpoint}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def __getattr__(self, name: str) -> Resources:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.resource(name.replace("_", "-"))

    def resource(self, plural: str) -> Resources:
        """The objects of one resource, by its plural."""
        return Resources(self, plural)

    def send(self, request: Request) -> Response:
        """The answer to a request of any kind; does not look at its status."""
        return self._transport.send(request)

    def call(self, request: Request) -> Any:
        """The content of the answer; raises what the server refused with."""
        return self.send(request).content()

    def lines(self, request: Request) -> AbstractContextManager[Iterator[str]]:
        """The lines of an answer that goes on, on a connection of its own."""
        return self._transport.lines(request)

    def discover(self) -> Mapping[str, Any]:
        """Every resource with its names, columns, verbs, actions and schema, and what the caller may do."""
        return requests.mapping(self.call(requests.discovery()))

    def watch(
        self,
        of: str,
        *,
        labels: str = "",
        fields: str = "",
        after: int | None = None,
        raise_compacted: bool = False,
        seconds: float | None = None,
        on_gap: Callable[[BaseException | None, float], None] | None = None,
    ) -> Iterator[Change]:
        """What there is, then every change, over any number of connections, until the time is up.

        `of` names resources, with or without scopes: `gpus,instances@/tenants/acme`. With `after`, the
        revision of a list, what there is is not told again. `on_gap` hears why a connection ended, and after
        how many seconds the next one is tried. The first connection must succeed.
        """
        import random

        watch = Watch(of=of, labels=labels, fields=fields, after=after, raise_compacted=raise_compacted)
        deadline = None if seconds is None else time.monotonic() + seconds
        is_open = False
        while True:
            reader, ended = EventReader(), None
            try:
                with self._transport.lines(watch.request(), until=deadline) as lines:
                    is_open = True
                    for line in lines:
                        if deadline is not None and time.monotonic() >= deadline:
                            return
                        if (event := reader.line(line)) is not None:
                            yield from watch.on_event(*event)
                            if event[1] == "compacted":
                                break
            except (Unavailable, TimeoutError) as error:
                if deadline is not None and time.monotonic() >= deadline:
                    return
                if not is_open:
                    raise
                ended = error
            delay = watch.on_end(ended, jitter=random.random())  # noqa: S311  # jitter
            if on_gap is not None:
                on_gap(ended, delay)
            if deadline is not None:
                delay = min(delay, max(0.0, deadline - time.monotonic()))
            time.sleep(delay)
            if deadline is not None and time.monotonic() >= deadline:
                return

    def plan(
        self,
        objects: Sequence[Mapping[str, Any]],
        *,
        owner: str = "",
        scope: str = "",
        prune: bool = False,
        take_over: bool = False,
    ) -> Plan:
        """What applying these objects would change; nothing is changed yet."""
        return Plan.of(
            self.call(requests.plan(objects, owner=owner, scope=scope, prune=prune, take_over=take_over))
        )

    def apply_plan(self, plan: Plan | str) -> Mapping[str, Any]:
        """Apply a plan by its id, in one transaction; refused if anything it was based on has changed."""
        return requests.mapping(self.call(requests.apply_plan(plan if isinstance(plan, str) else plan.id)))

    def forget_plan(self, plan: Plan | str) -> None:
        """Forget a plan; what it did stays."""
        self.call(requests.forget_plan(plan if isinstance(plan, str) else plan.id))

    def apply(
        self,
        objects: Sequence[Mapping[str, Any]],
        *,
        owner: str = "",
        scope: str = "",
        prune: bool = False,
        take_over: bool = False,
    ) -> Mapping[str, Any]:
        """Plan and apply together."""
        return self.apply_plan(self.plan(objects, owner=owner, scope=scope, prune=prune, take_over=take_over))


class Resources:
    """The objects of one resource."""

    def __init__(self, fleet: Fleet, plural: str) -> None:
        self.fleet = fleet
        self.plural = plural

    def __repr__(self) -> str:
        return f"<Resources {self.plural} of {self.fleet!r}>"

    def get(self, name: str, *, scope: str = "") -> Object:
        """One object, with its ETag."""
        answer = self.fleet.send(requests.get(self.plural, name, scope))
        return Object.of(answer.content(), etag=answer.headers.get("etag", ""))

    def list(self, query: Query | None = None, **asked: Any) -> Listing:
        """Every object at and below a scope, page by page: `scope`, `labels`, `fields`, `sort`."""
        items, revision = [], 0
        for number, (found, seen) in enumerate(self.pages(query or Query(**asked))):
            items += [Object.of(one) for one in found]
            revision = seen if number == 0 else revision
        return Listing(items=items, revision=revision)

    def pages(self, query: Query, *, as_table: bool = False) -> Iterator[tuple[Sequence[Any], int]]:
        """The pages of a list as the server writes them, each with the list's revision."""
        for content in self.contents(query, as_table=as_table):
            entries, _, revision = page_of(content, rows="rows" if as_table else "items")
            yield entries, revision

    def contents(self, query: Query, *, as_table: bool = False) -> Iterator[Any]:
        """The whole answers that a list is made of."""
        following = ""
        while True:
            content = self.fleet.call(requests.page(self.plural, query, following, as_table=as_table))
            yield content
            before, (_, following, _) = following, page_of(content, rows="rows" if as_table else "items")
            if not following:
                return
            requests.check_goes_on(before, following)

    def watch(self, *, scope: str = "", **how: Any) -> Iterator[Change]:
        """What there is, then every change; see `Fleet.watch`."""
        return self.fleet.watch(requests.watched(self.plural, scope), **how)

    def put(self, wanted: Mapping[str, Any], *, etag: str = "", dry_run: bool = False) -> Object:
        """Create an object, or replace the version that `etag` names."""
        answer = self.fleet.send(requests.put(self.plural, wanted, etag=etag, dry_run=dry_run))
        return Object.of(answer.content(), etag=answer.headers.get("etag", ""))

    def patch(
        self, name: str, patch: Mapping[str, Any], *, scope: str = "", etag: str = "*", dry_run: bool = False
    ) -> Object:
        """Merge into an object (RFC 7396); `etag` names the version that was seen."""
        request = requests.patch(self.plural, name, patch, scope=scope, etag=etag, dry_run=dry_run)
        answer = self.fleet.send(request)
        return Object.of(answer.content(), etag=answer.headers.get("etag", ""))

    def delete(self, name: str, *, scope: str = "", etag: str = "", dry_run: bool = False) -> None:
        """Delete an object; with `etag`, only that version of it."""
        self.fleet.call(requests.delete(self.plural, name, scope=scope, etag=etag, dry_run=dry_run))

    def act(self, name: str, action: str, body: Any = None, *, scope: str = "") -> Any:
        """Have something done with an object, such as `scale`; answers what it began or did."""
        return self.fleet.call(requests.act(self.plural, name, action, body, scope=scope))

    def explain(self, name: str, *, scope: str = "") -> Mapping[str, Any]:
        """Why an object is as it is."""
        return requests.mapping(self.fleet.call(requests.explain(self.plural, name, scope=scope)))

    def logs(self, name: str, *, scope: str = "", **asked: Any) -> Iterator[LogLine]:
        """What an object writes down: `tail`, `follow`, `level`, `source`, `contains`.

        The last `tail` lines; with `follow`, then every line as it comes, until it is left. Raises
        `Unavailable` where a log breaks off that was to be followed.
        """
        reader, events = LogReader(), EventReader()
        with self.fleet.lines(watches.request(self.plural, name, scope=scope, **asked)) as lines:
            for line in lines:
                if (event := events.line(line)) is not None:
                    if (told := reader.on_event(event[1], event[2])) is not None:
                        yield told
                    if reader.is_over:
                        return
        reader.check_over()

    def figures(self, query: Query | None = None, **asked: Any) -> Sequence[Mapping[str, Any]]:
        """What was measured lately, object by object: `name`, `scope`, `at` and `values`."""
        found = requests.mapping(self.fleet.call(requests.figures(self.plural, query or Query(**asked))))
        return requests.items(found)

    def history(
        self, name: str, *, scope: str = "", since: str = "", until: str = "", step: int = 0
    ) -> Mapping[str, Any]:
        """What was measured of an object over time: `series`, each with `name`, `unit` and `points`.

        `since` and `until` are times such as 2026-03-01T00:00:00Z (the last hour, if not given), `step` is
        in seconds.
        """
        request = requests.history(self.plural, name, scope=scope, since=since, until=until, step=step)
        return requests.mapping(self.fleet.call(request))

    def wait_for(
        self, name: str, expected: str, *, scope: str = "", seconds: float | None = None
    ) -> Object | None:
        """Wait until something holds of an object: `Ready`, `.status.state=connected` or `deleted`.

        Answers the object as it is then (None when it was to be deleted); raises `TimeoutError` with what
        is the case instead, and `NotFound` if there is no such object.
        """
        wanted = Expectation.parsed(expected)
        try:
            found: Object | None = self.get(name, scope=scope)
        except NotFound:
            if not wanted.is_deletion:
                raise
            return None
        if wanted.holds(found):
            return found
        assert found is not None
        after, where = found.metadata.revision, found.metadata.scope
        for change in self.watch(
            scope=where, fields=f"metadata.name={name}", seconds=seconds, after=after or None
        ):
            if change.object.name != name:
                continue
            found = None if change.type == "deleted" else change.object
            if wanted.holds(found):
                return found
            if found is None:
                raise NotFound(f"{name} was deleted while {wanted} was waited for")
        raise TimeoutError(f"{name}: {wanted.told(found)} after {seconds:g} s, not {wanted}")
