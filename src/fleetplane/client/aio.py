"""The resource API for programs with an event loop; the same names as in `fleetplane.client.sync`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import httpx

from fleetplane.client import requests, watches
from fleetplane.client.calls import (
    ANSWER_LIMIT_BYTES,
    EVENT_LIMIT_BYTES,
    JSON,
    Request,
    Response,
    page_of,
    refusal,
)
from fleetplane.client.objects import Change, Expectation, Listing, Object
from fleetplane.client.places import Endpoint, Place, resolve
from fleetplane.client.requests import Plan, Query
from fleetplane.client.transport import AGENT, QUIET_SECONDS
from fleetplane.client.trust import refusal_in, trusting
from fleetplane.client.watches import EventReader, LogLine, LogReader, Watch
from fleetplane.kernel.errors import IntegrityError, InvalidArgument, NotFound, Unavailable


def connect(place: Place | None = None, **said: Any) -> Fleet:
    """The server that is meant: `connect()` is the current context, as on the command line.

    `connect(context="prod")`, `connect(server="https://fleet.example", token="…", ca=Path("ca.pem"))` and
    `connect(data_dir=Path("/var/lib/fleetplane"))` say which one; see `Place`. Nothing is sent yet.
    """
    return Fleet(resolve(place if place is not None else Place(**said)))


class Fleet:
    """A server's resources; an async context manager. `fleet.gpus` is `fleet.resource("gpus")`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        verify: ssl.SSLContext | bool = True
        if endpoint.server.startswith("https:"):
            verify = trusting(endpoint.ca_pem)
        headers = {"user-agent": AGENT, "accept": JSON}
        if endpoint.token:
            headers["authorization"] = f"Bearer {endpoint.token}"
        uds = None if endpoint.socket is None else str(endpoint.socket)
        try:
            self._http = httpx.AsyncClient(
                base_url=endpoint.server or "http://localhost",
                headers=headers,
                timeout=endpoint.timeout,
                transport=httpx.AsyncHTTPTransport(uds=uds, verify=verify, trust_env=False),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise InvalidArgument(f"{endpoint.server} is no address of a server: {error}") from error

    def __repr__(self) -> str:
        return f"<Fleet {self.endpoint}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    def __getattr__(self, name: str) -> Resources:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.resource(name.replace("_", "-"))

    def resource(self, plural: str) -> Resources:
        """The objects of one resource, by its plural."""
        return Resources(self, plural)

    async def send(self, request: Request) -> Response:
        """The answer to a request of any kind; does not look at its status."""
        async with self._opened(request) as answer:
            body = bytearray()
            with self._reaching():
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > ANSWER_LIMIT_BYTES:
                        raise IntegrityError(
                            f"{self.endpoint} answers with more than {ANSWER_LIMIT_BYTES} bytes"
                        )
            return Response(status=answer.status_code, headers=dict(answer.headers), body=bytes(body))

    async def call(self, request: Request) -> Any:
        """The content of the answer; raises what the server refused with."""
        return (await self.send(request)).content()

    @contextlib.asynccontextmanager
    async def _opened(
        self, request: Request, *, quiet_seconds: float | None = None
    ) -> AsyncIterator[httpx.Response]:
        headers = dict(request.headers)
        content = request.content
        if content is not None:
            headers.setdefault("content-type", JSON)
        seconds = self.endpoint.timeout
        made = self._http.build_request(
            request.method,
            request.target,
            content=content,
            headers=headers,
            timeout=httpx.Timeout(seconds, read=quiet_seconds or seconds),
        )
        with self._reaching():
            answer = await self._http.send(made, stream=True)
        try:
            yield answer
        finally:
            await answer.aclose()

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        try:
            yield
        except httpx.TimeoutException as error:
            raise TimeoutError(f"{self.endpoint} did not answer in time") from error
        except httpx.HTTPError as error:
            if (refused := refusal_in(error, self.endpoint.server)) is not None:
                raise refused from error
            raise Unavailable(
                f"{self.endpoint} cannot be reached: {error or type(error).__name__}",
                hint="is `fleetplane server` running there?",
            ) from error

    async def discover(self) -> Mapping[str, Any]:
        """Every resource with its names, columns, verbs, actions and schema, and what the caller may do."""
        return requests.mapping(await self.call(requests.discovery()))

    async def watch(
        self,
        of: str,
        *,
        labels: str = "",
        fields: str = "",
        after: int | None = None,
        raise_compacted: bool = False,
        on_gap: Callable[[BaseException | None, float], None] | None = None,
    ) -> AsyncGenerator[Change]:
        """What there is, then every change, over any number of connections, until it is left.

        `of` names resources, with or without scopes: `gpus,instances@/tenants/acme`. With `after`, the
        revision of a list, what there is is not told again. `on_gap` hears why a connection ended, and after
        how many seconds the next one is tried. The first connection must succeed. Leave it with
        `contextlib.aclosing`, or at the end of the program.
        """
        watch = Watch(of=of, labels=labels, fields=fields, after=after, raise_compacted=raise_compacted)
        is_open = False
        while True:
            ended: BaseException | None = None
            try:
                async with self._opened(watch.request(), quiet_seconds=QUIET_SECONDS) as answer:
                    await self._check(answer)
                    is_open = True
                    async with contextlib.aclosing(self._events(answer)) as events:
                        async for event in events:
                            for change in watch.on_event(*event):
                                yield change
                            if event[1] == "compacted":
                                break
            except (Unavailable, TimeoutError) as error:
                if not is_open:
                    raise
                ended = error
            delay = watch.on_end(ended, jitter=random.random())  # noqa: S311  # jitter
            if on_gap is not None:
                on_gap(ended, delay)
            await asyncio.sleep(delay)

    async def events(self, request: Request) -> AsyncGenerator[tuple[str, str, str]]:
        """Server-sent events (mark, kind, data) of an answer that goes on; raises what was refused."""
        async with self._opened(request, quiet_seconds=QUIET_SECONDS) as answer:
            await self._check(answer)
            async with contextlib.aclosing(self._events(answer)) as events:
                async for event in events:
                    yield event

    async def _check(self, answer: httpx.Response) -> None:
        if answer.status_code >= 400:
            with self._reaching():
                body = await answer.aread()
            raise refusal(Response(status=answer.status_code, headers=dict(answer.headers), body=body))

    async def _events(self, answer: httpx.Response) -> AsyncGenerator[tuple[str, str, str]]:
        reader, rest = EventReader(), b""
        with self._reaching():
            async for chunk in answer.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > EVENT_LIMIT_BYTES:
                    raise IntegrityError(
                        f"{self.endpoint} sends a line of more than {EVENT_LIMIT_BYTES} bytes"
                    )
                for line in lines:
                    event = reader.line(line.decode("utf-8", errors="replace").rstrip("\r"))
                    if event is not None:
                        yield event

    async def plan(
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
            await self.call(
                requests.plan(objects, owner=owner, scope=scope, prune=prune, take_over=take_over)
            )
        )

    async def apply_plan(self, plan: Plan | str) -> Mapping[str, Any]:
        """Apply a plan by its id, in one transaction; refused if anything it was based on has changed."""
        request = requests.apply_plan(plan if isinstance(plan, str) else plan.id)
        return requests.mapping(await self.call(request))

    async def forget_plan(self, plan: Plan | str) -> None:
        """Forget a plan; what it did stays."""
        await self.call(requests.forget_plan(plan if isinstance(plan, str) else plan.id))

    async def apply(
        self,
        objects: Sequence[Mapping[str, Any]],
        *,
        owner: str = "",
        scope: str = "",
        prune: bool = False,
        take_over: bool = False,
    ) -> Mapping[str, Any]:
        """Plan and apply together."""
        return await self.apply_plan(
            await self.plan(objects, owner=owner, scope=scope, prune=prune, take_over=take_over)
        )


class Resources:
    """The objects of one resource."""

    def __init__(self, fleet: Fleet, plural: str) -> None:
        self.fleet = fleet
        self.plural = plural

    def __repr__(self) -> str:
        return f"<Resources {self.plural} of {self.fleet!r}>"

    async def get(self, name: str, *, scope: str = "") -> Object:
        """One object, with its ETag."""
        answer = await self.fleet.send(requests.get(self.plural, name, scope))
        return Object.of(answer.content(), etag=answer.headers.get("etag", ""))

    async def list(self, query: Query | None = None, **asked: Any) -> Listing:
        """Every object at and below a scope, page by page: `scope`, `labels`, `fields`, `sort`."""
        wanted, items, following, first = query or Query(**asked), [], "", 0
        while True:
            content = await self.fleet.call(requests.page(self.plural, wanted, following))
            before = following
            found, following, revision = page_of(content)
            items += [Object.of(one) for one in found]
            first = first or revision
            if not following:
                return Listing(items=items, revision=first)
            requests.check_goes_on(before, following)

    def watch(self, *, scope: str = "", **how: Any) -> AsyncGenerator[Change]:
        """What there is, then every change; see `Fleet.watch`."""
        return self.fleet.watch(requests.watched(self.plural, scope), **how)

    async def put(self, wanted: Mapping[str, Any], *, etag: str = "", dry_run: bool = False) -> Object:
        """Create an object, or replace the version that `etag` names."""
        answer = await self.fleet.send(requests.put(self.plural, wanted, etag=etag, dry_run=dry_run))
        return Object.of(answer.content(), etag=answer.headers.get("etag", ""))

    async def patch(
        self, name: str, patch: Mapping[str, Any], *, scope: str = "", etag: str = "*", dry_run: bool = False
    ) -> Object:
        """Merge into an object (RFC 7396); `etag` names the version that was seen."""
        request = requests.patch(self.plural, name, patch, scope=scope, etag=etag, dry_run=dry_run)
        answer = await self.fleet.send(request)
        return Object.of(answer.content(), etag=answer.headers.get("etag", ""))

    async def delete(self, name: str, *, scope: str = "", etag: str = "", dry_run: bool = False) -> None:
        """Delete an object; with `etag`, only that version of it."""
        await self.fleet.call(requests.delete(self.plural, name, scope=scope, etag=etag, dry_run=dry_run))

    async def act(self, name: str, action: str, body: Any = None, *, scope: str = "") -> Any:
        """Have something done with an object, such as `scale`; answers what it began or did."""
        return await self.fleet.call(requests.act(self.plural, name, action, body, scope=scope))

    async def explain(self, name: str, *, scope: str = "") -> Mapping[str, Any]:
        """Why an object is as it is."""
        return requests.mapping(await self.fleet.call(requests.explain(self.plural, name, scope=scope)))

    async def logs(self, name: str, *, scope: str = "", **asked: Any) -> AsyncGenerator[LogLine]:
        """What an object writes down: `tail`, `follow`, `level`, `source`, `contains`.

        The last `tail` lines; with `follow`, then every line as it comes, until it is left. Raises
        `Unavailable` where a log breaks off that was to be followed.
        """
        reader = LogReader()
        request = watches.request(self.plural, name, scope=scope, **asked)
        async with contextlib.aclosing(self.fleet.events(request)) as events:
            async for _, kind, data in events:
                if (told := reader.on_event(kind, data)) is not None:
                    yield told
                if reader.is_over:
                    return
        reader.check_over()

    async def figures(self, query: Query | None = None, **asked: Any) -> Sequence[Mapping[str, Any]]:
        """What was measured lately, object by object: `name`, `scope`, `at` and `values`."""
        request = requests.figures(self.plural, query or Query(**asked))
        return requests.items(requests.mapping(await self.fleet.call(request)))

    async def history(
        self, name: str, *, scope: str = "", since: str = "", until: str = "", step: int = 0
    ) -> Mapping[str, Any]:
        """What was measured of an object over time: `series`, each with `name`, `unit` and `points`.

        `since` and `until` are times such as 2026-03-01T00:00:00Z (the last hour, if not given), `step` is
        in seconds.
        """
        request = requests.history(self.plural, name, scope=scope, since=since, until=until, step=step)
        return requests.mapping(await self.fleet.call(request))

    async def wait_for(
        self, name: str, expected: str, *, scope: str = "", seconds: float | None = None
    ) -> Object | None:
        """Wait until something holds of an object: `Ready`, `.status.state=connected` or `deleted`.

        Answers the object as it is then (None when it was to be deleted); raises `TimeoutError` with what
        is the case instead, and `NotFound` if there is no such object.
        """
        wanted = Expectation.parsed(expected)
        found: Object | None = None
        try:
            async with asyncio.timeout(seconds):
                found = await self.get(name, scope=scope)
                if wanted.holds(found):
                    return found
                where, after = found.metadata.scope, found.metadata.revision
                watch = self.watch(scope=where, fields=f"metadata.name={name}", after=after or None)
                async with contextlib.aclosing(watch) as changes:
                    async for change in changes:
                        if change.object.name != name:
                            continue
                        found = None if change.type == "deleted" else change.object
                        if wanted.holds(found):
                            return found
                        if found is None:
                            raise NotFound(f"{name} was deleted while {wanted} was waited for")
        except NotFound:
            if found is None and wanted.is_deletion:
                return None
            raise
        except TimeoutError as error:
            if found is None:
                raise
            raise TimeoutError(f"{name}: {wanted.told(found)} after {seconds:g} s, not {wanted}") from error
        raise AssertionError("a watch goes on until it is left")
