"""The route table: for every route its caller, its permission, its shapes and its words.

One table serves the dispatcher, the access check and the OpenAPI document, so none of the
three can forget a route. Knows no framework and no domain.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET

from fleetplane.kernel.access import Permission
from fleetplane.kernel.errors import SettingsError
from fleetplane.kernel.resources import AnyResource
from fleetplane.rpc import Needs
from fleetplane.web.rest import console
from fleetplane.web.rest.problems import Envelope


class Caller(Protocol):
    """Who calls, as the bearer token proved it."""

    @property
    def name(self) -> str:
        """Stable and unique: rates and idempotency keys are kept by it."""


C = TypeVar("C", bound=Caller)
T = TypeVar("T")


class Headers:
    """A request's headers by name; of several values the last. Decoded when asked for: few are."""

    __slots__ = ("_method", "_raw", "secure")

    def __init__(self, raw: Mapping[bytes, bytes], *, method: str = "GET", secure: bool = False) -> None:
        self._raw = raw
        self._method = method
        self.secure = secure
        """Whether the request came over TLS."""

    def get(self, name: str) -> str | None:
        """`name` in lower case."""
        value = self._raw.get(name.encode("ascii"))
        return None if value is None else value.decode("latin-1")

    @property
    def credential(self) -> str | None:
        """What the caller shows of itself, in the form of an `Authorization` header; None for nothing.

        Raises `Unauthenticated` for a console session without the token that protects it.
        """
        return console.credential(
            self.get("authorization"),
            self.get("cookie"),
            self.get(console.CSRF_HEADER),
            method=self._method,
            secure=self.secure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[T]):
    content: T
    headers: Mapping[str, str] = field(default_factory=dict)
    status: int | None = None
    """Where it is another than the route's, which is what a kept answer has."""
    cookies: Sequence[str] = ()
    """`Set-Cookie` headers, where there may be several; never kept."""


class Receipt(Protocol):
    """Makes a request idempotent: its answer is recorded in the transaction that it writes."""

    def signed(self, actor: str) -> str:
        """The name under which to write."""

    def promise(self, view: Callable[[Any], Answer[Any]]) -> None:
        """How the answer follows from what the writing transaction returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[C]):
    """One request, after everything that every route has in common was seen to."""

    request_id: str
    address: str
    """The other end's host."""
    scope: str
    """Where the thing named by the path lies; empty for paths that name none."""
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Headers
    many: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of those parameters of the query that may be given more than once."""
    body: Any
    """As the route's shape; typed by the handler that takes it apart."""
    receipt: Receipt | None = None
    """None for requests that may happen as often as they are sent."""
    _caller: C | None = None

    def signed(self, actor: str) -> str:
        """Under which name to write what must happen once."""
        return actor if self.receipt is None else self.receipt.signed(actor)

    def answering(self, view: Callable[[Any], Answer[T]]) -> Callable[[Any], Answer[T]]:
        """Declare how the answer follows from what is written, so that both become durable together.

        The view is given what the one transaction of the handler returns, inside the store's
        writer: it must not wait, and sees the store as it was before.
        """
        if self.receipt is not None:
            self.receipt.promise(view)
        return view

    @property
    def caller(self) -> C:
        assert self._caller is not None, "a public route has no caller"
        return self._caller

    @property
    def user_agent(self) -> str:
        return self.headers.get("user-agent") or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An answer that goes on until its source ends or the reader has left."""

    chunks: AsyncGenerator[bytes]
    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)
    beginning: Answer[Any] | None = None
    """What whoever sends the request again is told, where that begins nothing new."""


Handler = Callable[[Call[Any]], Awaitable[Answer[Any] | Stream]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One parameter of a query, for the document."""

    name: str
    summary: str
    kind: str = "string"
    choices: Sequence[str] = ()
    default: str | int | None = None
    low: int | None = None
    high: int | None = None
    many: bool = False
    """Whether it may be given more than once."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """One route. Most are declared in one line by a `RouteGroup`."""

    method: str
    path: str
    """Below the table's prefix, with `{name}` for parameters."""
    handler: Handler
    summary: str
    tag: str
    public: bool = False
    """Served without a caller, as signing in is."""
    permission: Permission | None = None
    """Checked in the scope of what the path names; None for what every caller may do."""
    body: Any = None
    """The shape of the request's body."""
    body_optional: bool = False
    answer: Any = UNSET
    """The shape of the answer, None for an empty one; by default what the handler is annotated to return."""
    status: int = 200
    shares_handler: bool = False
    """Whether its handler serves another path too."""
    streams: bool = False
    """Whether it may answer with a `Stream`, which nobody can be given a second time."""
    begins_once: bool = False
    """Whether each `Stream` of it has a `beginning` that can be kept."""
    needs: Needs = Needs.ACTIVE
    """What a server must have, of several on one database, in order to answer."""
    query: Sequence[Query] = ()
    open_query: bool = False
    """Whether parameters that it does not declare are let pass, where others decide what is sent."""
    envelope: Envelope | None = None
    """How its errors look, where they differ from those of its table."""
    recheck: Callable[[Call[Any]], object] | None = None
    """What its handler asks of a caller beyond the permission, such as rights in what the body names. Asked
    again before an answer that was kept is given once more: meanwhile it may have been taken from them."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    @cached_property
    def answer_shape(self) -> Any:
        """The shape of the answer; None for an empty one and for a stream."""
        if self.answer is not UNSET:
            return self.answer
        returned = get_type_hints(self.handler).get("return")
        if get_origin(returned) is not Answer:
            return None
        (shape,) = get_args(returned)
        return None if shape is NoneType else shape


def _first_line(handler: Handler) -> str:
    first, _, _ = (handler.__doc__ or "").partition("\n")
    return first.removesuffix(".")


class _Declare(Protocol):
    """One line for one route; `options` are the other fields of `Route`."""

    def __call__(
        self, path: str, handler: Handler, permission: Permission | None = None, **options: Any
    ) -> Route: ...


class RouteGroup:
    """Declares the routes below one heading of the OpenAPI document, one line each.

    The first line of the handler's docstring is the summary, and its annotation has the shape of the answer.
    A GET needs the store, every other method the right to write, unless the row says otherwise in `needs`.
    """

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.get: _Declare = self._declare("GET", Needs.STORE)
        self.post: _Declare = self._declare("POST", Needs.WRITES)
        self.put: _Declare = self._declare("PUT", Needs.WRITES)
        self.patch: _Declare = self._declare("PATCH", Needs.WRITES)
        self.delete: _Declare = self._declare("DELETE", Needs.WRITES)

    def _declare(self, method: str, needs: Needs) -> _Declare:
        def declare(
            path: str, handler: Handler, permission: Permission | None = None, **options: Any
        ) -> Route:
            said = {"needs": needs, "summary": _first_line(handler), **options}
            return Route(
                method=method, path=path, handler=handler, tag=self.tag, permission=permission, **said
            )

        return declare


class Gate(Protocol[C]):
    """The domain's own part: who calls, and may they."""

    def authenticate(self, headers: Headers) -> C:
        """The caller, by `headers.credential`; raises `Unauthenticated`."""

    def admit(self, caller: C, permission: Permission | None, path: Mapping[str, str]) -> str:
        """The scope of what the path names; raises `NotFound` or `PermissionDenied`."""


class RouteTable:
    """Every route once; refuses two for the same request, and routes that forgot their permission."""

    def __init__(self, prefix: str, routes: Iterable[Route], *, strict_queries: bool = False) -> None:
        """With `strict_queries`, a parameter that a route does not declare is refused.

        A misspelt filter would otherwise be answered as if there were none.
        """
        self.prefix = prefix
        self.strict_queries = strict_queries
        self.routes = tuple(routes)
        seen: set[str] = set()
        for route in self.routes:
            if route.name in seen:
                raise SettingsError(f"two routes for {route.name}")
            seen.add(route.name)
            if not route.summary:
                raise SettingsError(f"{route.name} has no summary; give its handler a docstring")
            if "{" in route.path and not route.public and route.permission is None:
                raise SettingsError(f"{route.name} names a thing, but no permission")
            if route.needs is Needs.STORE and route.method != "GET":
                raise SettingsError(f"{route.name} is said to read, and is no GET")
            if _answers_anyone_twice(route):
                raise SettingsError(f"{route.name} has no permission, and nothing to check before a replay")

    @property
    def is_served_anywhere(self) -> bool:
        """Whether a server that is not the active one answers some of it."""
        return any(route.needs is not Needs.ACTIVE for route in self.routes)

    @property
    def permissions(self) -> set[Permission]:
        return {route.permission for route in self.routes if route.permission is not None}

    def __repr__(self) -> str:
        return f"<RouteTable {self.prefix} routes={len(self.routes)}>"


def _answers_anyone_twice(route: Route) -> bool:
    """Whether a stored answer would be repeated to a caller whose rights are not checked again."""
    if route.method != "POST" or route.public or route.answer_shape is None:
        return False
    return route.permission is None and route.recheck is None


# Optimistic concurrency.

_SPECS = msgspec.msgpack.Encoder()
TAG_LIMIT = 64


def etag(resource: AnyResource) -> str:
    """Changes with the spec of this incarnation, not with what an agent reports about itself.

    Generations are counted anew from a backup that was restored: what a lost one said must not pass for
    what another says now, so that the content counts too.
    """
    content = hashlib.blake2b(_SPECS.encode(resource.spec), digest_size=6).hexdigest()
    return f'W/"{resource.uid[:12]}-{resource.generation}-{content}"'


def is_of_another_lineage(condition: str | None, resource: AnyResource) -> bool:
    """Whether an `If-Match` header names a version that this thing never had here.

    A later generation than the present one, or the same of other content: it was lost before a backup was
    restored. An earlier one is merely old.
    """
    _, _, present = _parts(etag(resource))
    for part in (condition or "").split(","):
        uid, generation, content = _parts(part)
        if uid == resource.uid[:12] and generation.isdecimal():
            later = int(generation) - resource.generation
            if later > 0 or (later == 0 and content != present):
                return True
    return False


def _parts(tag: str) -> tuple[str, str, str]:
    found = tag.strip().removeprefix("W/").strip('"').split("-")
    return (found[0], found[1], found[2]) if len(found) == 3 and len(tag) <= TAG_LIMIT else ("", "", "")


def matches(condition: str | None, resource: AnyResource) -> bool:
    """Whether an `If-Match` header, if there is one, names this version."""
    if condition is None or condition.strip() == "*":
        return True
    wanted = etag(resource).removeprefix("W/")
    return any(part.strip().removeprefix("W/") == wanted for part in condition.split(","))
