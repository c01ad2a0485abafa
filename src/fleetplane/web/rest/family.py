"""What every REST family has: idempotency, gateway, OpenAPI document, mounts, metrics and sweep.

A domain brings its route table, its gate and how its errors look; the rest is the same for all.
Litestar is loaded with the gateway: when its numbers are asked for, which is while a domain is built, or else
with the first request.

The OpenAPI 3.1 document of a route table.

Made from the same table that serves the requests; schemas are msgspec's own, of the same
structs that bodies are read into and answers are written from. Pure.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from prometheus_client.registry import Collector

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.ops import App, Mount
from fleetplane.web.rest.gateway import REQUESTS_PER_MINUTE, Gateway, GatewayCollector, Receive, Scope, Send
from fleetplane.web.rest.idempotency import Answers
from fleetplane.web.rest.problems import Envelope, ErrorEnvelope, refusal
from fleetplane.web.rest.routes import C, Caller, Gate, Query, Route, RouteTable

VERSION = "3.1.0"
REJECTED = "422"
JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"
_BY_NAME = ("properties", "mapping")
"""Parts of a schema whose keys are names of ours."""
_PARAMETER = re.compile(r"\{(\w+)\}")
_ERRORS = {
    "401": "Authentication required or invalid credentials",
    "403": "Insufficient permissions",
    "404": "Resource not found",
    "409": "Resource conflict",
    "412": "A version that was lost before a backup was restored",
    REJECTED: "Request validation failed",
    "429": "Too many requests",
    "500": "Server internal error",
    "503": "Service temporarily unavailable",
}
_WORDS = {200: "OK", 201: "Created", 202: "Accepted", 204: "Done", 302: "Found"}


def openapi_document(
    table: RouteTable,
    *,
    title: str,
    version: str,
    description: str,
    error: Any = ErrorEnvelope,
    rejected: str = REJECTED,
    conditional: bool = True,
    error_type: str = JSON,
) -> dict[str, Any]:
    """`error` is the shape of every refusal, `error_type` its media type, `rejected` the status of bad input.

    `conditional` says whether things have versions that a request may insist on.
    """
    errors = {
        rejected if status == REJECTED else status: words
        for status, words in _ERRORS.items()
        if conditional or status != "412"
    }
    shapes = [error, *_shapes(table.routes)]
    references, schemas = msgspec.json.schema_components(shapes, ref_template=_REFERENCE)
    by_shape = dict(zip(shapes, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in table.routes:
        made = _operation(route, by_shape, sorted(errors))
        if conditional and route.method in ("PATCH", "DELETE"):
            made["parameters"].append(_header("If-Match", "Only if the resource still has this ETag", 255))
        paths.setdefault(route.path, {})[route.method.lower()] = made
    return {
        "openapi": VERSION,
        "info": {"title": title, "version": version, "description": description},
        "servers": [{"url": table.prefix}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "schemas": {name: _readable(schema) for name, schema in schemas.items()},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
            "responses": {
                status: {
                    "description": words,
                    "content": {error_type: {"schema": by_shape[error]}},
                }
                for status, words in errors.items()
            },
        },
    }


def _readable(schema: Any) -> Any:
    """A schema in words that generators of clients can read.

    Of an array of fixed length, `items: false` repeats what `maxItems` says. A default that is an object is
    told in the description.
    """
    if isinstance(schema, list):
        return [_readable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {
        name: {key: _readable(one) for key, one in value.items()} if name in _BY_NAME else _readable(value)
        for name, value in schema.items()
        if not (name == "items" and value is False)
    }
    if isinstance(made.get("default"), dict):
        told = f"Default: {msgspec.json.encode(made.pop('default')).decode()}"
        made["description"] = f"{made['description']}\n\n{told}" if "description" in made else told
    return made


def _shapes(routes: Iterable[Route]) -> list[Any]:
    """Each once, in the order of the table."""
    found = (shape for route in routes for shape in (route.body, route.answer_shape) if shape is not None)
    return list(dict.fromkeys(found))


def _operation(route: Route, by_shape: dict[Any, Any], errors: Iterable[str]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": [*_path_parameters(route), *(_query_parameter(query) for query in route.query)],
        "responses": _responses(route, by_shape, errors),
    }
    if route.public:
        made["security"] = []
    if route.method == "POST" and not route.public:
        made["parameters"].append(
            _header("Idempotency-Key", "A request repeated with the same key is carried out once", 255)
        )
    if route.body is not None:
        made["requestBody"] = {
            "required": not route.body_optional,
            "content": {"application/json": {"schema": by_shape[route.body]}},
        }
    return made


def _operation_id(route: Route) -> str:
    """The handler's name, with what the path names: a handler may serve several paths."""
    handler = route.handler.__qualname__.replace("Routes.", "_").replace(".", "_")
    named = _PARAMETER.findall(route.path)
    return "_of_".join((handler, *named)) if route.shares_handler else handler


def _responses(route: Route, by_shape: dict[Any, Any], errors: Iterable[str]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": _WORDS[route.status]}
    if route.answer_shape is not None:
        done["content"] = {"application/json": {"schema": by_shape[route.answer_shape]}}
    if route.streams and (route.begins_once or route.method == "GET"):
        done.setdefault("content", {})["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        str(route.status): done,
        **{status: {"$ref": f"#/components/responses/{status}"} for status in errors},
    }


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(route.path)
    ]


def _header(name: str, summary: str, limit: int) -> dict[str, Any]:
    return {
        "name": name,
        "in": "header",
        "description": summary,
        "schema": {"type": "string", "maxLength": limit},
    }


def _query_parameter(query: Query) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": query.kind if query.kind in ("integer", "boolean") else "string"}
    if query.kind == "date-time":
        schema["format"] = "date-time"
    optional = {
        "enum": list(query.choices) or None,
        "default": query.default,
        "minimum": query.low,
        "maximum": query.high,
    }
    schema |= {name: value for name, value in optional.items() if value is not None}
    if query.many:
        schema = {"type": "array", "items": schema}
    return {"name": query.name, "in": "query", "description": query.summary, "schema": schema}


SWEEP_SECONDS = 3600.0
Sweep = Callable[[], Awaitable[object]]


class FamilyKernel(Protocol):
    """What of the kernel a family needs."""

    @property
    def store(self) -> Store: ...

    @property
    def clock(self) -> Clock: ...

    @property
    def master(self) -> MasterKey: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyText:
    """Texts of a REST family, for its OpenAPI document and the list of mounts."""

    title: str
    version: str
    description: str
    summary: str
    """Of its mount."""
    document_path: str = ""
    """Where its document is; `openapi.json` below its prefix unless said otherwise."""
    document_summary: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyErrors:
    """How the errors of a family look."""

    envelope: Envelope = refusal
    shape: Any = ErrorEnvelope
    """Of every refusal, for the document."""
    rejected: str = REJECTED
    """The status of a request that is wrong."""
    content_type: str = JSON
    """Of every refusal."""
    conditional: bool = True
    """Whether things have versions that a request may insist on."""


PROBLEMS = FamilyErrors()
C2 = TypeVar("C2", bound=Caller)


class RestFamily(Generic[C]):
    """One route table, served."""

    def __init__(
        self,
        kernel: FamilyKernel,
        table: RouteTable,
        gate: Gate[C],
        *,
        domain: str,
        text: FamilyText,
        errors: FamilyErrors = PROBLEMS,
        requests_per_minute: int = REQUESTS_PER_MINUTE,
        sweeps: Sequence[Sweep] = (),
        described: RouteTable | None = None,
    ) -> None:
        """`domain` names its metrics and keeps its idempotency keys; `sweeps` run beside its own, hourly.

        `described` is what the document is about, where that is more than the table.
        """
        self.table = table
        self._described = described or table
        self._gate = gate
        self._domain = domain
        self._text = text
        self._errors = errors
        self._clock = kernel.clock
        self._store = kernel.store
        self._requests_per_minute = requests_per_minute
        self._answers = Answers(kernel.store, kernel.master, kernel.clock, namespace=domain)
        self._sweeps = (*sweeps, self._answers.sweep)

    def __repr__(self) -> str:
        return f"<RestFamily {self._domain} {self.table!r}>"

    @cached_property
    def gateway(self) -> Gateway[C]:
        return self.application(self.table, self._gate)

    def application(self, table: RouteTable, gate: Gate[C2]) -> Gateway[C2]:
        """Another table, or the family's own, with the family's idempotency keys, limits and errors."""
        from fleetplane.web.rest.app import application

        return application(
            table,
            gate=gate,
            answers=self._answers,
            store=self._store,
            clock=self._clock,
            requests_per_minute=self._requests_per_minute,
            envelope=self._errors.envelope,
        )

    @cached_property
    def collectors(self) -> Sequence[Collector]:
        return (GatewayCollector(self.gateway, domain=self._domain),)

    @cached_property
    def mounts(self) -> Sequence[Mount]:
        """The routes and the document that describes them."""
        path = self._text.document_path or f"{self.table.prefix}/openapi.json"
        document = WebDocument(content_type="application/json", content=lambda: self.document)
        return (
            Mount(
                path=self.table.prefix,
                app=LateApp(lambda: self.gateway),
                summary=self._text.summary,
                needs=Needs.STORE if self.table.is_served_anywhere else Needs.ACTIVE,
            ),
            Mount(
                path=path,
                app=Documents({path: document}),
                summary=self._text.document_summary,
                needs=Needs.NOTHING,
            ),
        )

    @cached_property
    def document(self) -> bytes:
        """The OpenAPI document."""
        text, errors = self._text, self._errors
        made = openapi_document(
            self._described,
            title=text.title,
            version=text.version,
            description=text.description,
            error=errors.shape,
            rejected=errors.rejected,
            conditional=errors.conditional,
            error_type=errors.content_type,
        )
        return msgspec.json.encode(made)

    async def take_over(self) -> None:
        """Adopt idempotency keys as an earlier version kept them, before anything is done by their like."""
        await self._answers.adopt()

    async def run_active(self) -> None:
        """Sweep at the start and every hour, until cancelled."""
        while True:
            for sweep in self._sweeps:
                await sweep()
            await self._clock.sleep(SWEEP_SECONDS)


class LateApp:
    """An application that is made when it is first asked, beside the event loop."""

    def __init__(self, make: Callable[[], App]) -> None:
        self._make = make
        self._made: App | None = None
        self._making = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._made is None:
            async with self._making:
                if self._made is None:
                    self._made = await asyncio.to_thread(self._make)
        await self._made(scope, receive, send)
