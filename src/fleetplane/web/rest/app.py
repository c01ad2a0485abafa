"""The Litestar application of a route table.

Litestar finds the route and speaks ASGI; here is what happens around every handler, always in
this order: who calls, where the thing lies and whether they may, read the body, do, answer.
Errors of the one tree become the envelope here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Generic

import msgspec
import structlog
from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, NotFound, OutcomeUnknown
from fleetplane.kernel.store import Store
from fleetplane.rpc import Needs
from fleetplane.rpc.listening.doors import HANDLER
from fleetplane.web.ops import READS_ONLY
from fleetplane.web.rest import bodies
from fleetplane.web.rest.gateway import ARRIVAL, Arrival, Gateway, Send
from fleetplane.web.rest.idempotency import Answers, KeptAnswer
from fleetplane.web.rest.problems import Code, Envelope, MethodNotAllowed, Problem, Rejected, refusal
from fleetplane.web.rest.routes import C, Call, Gate, Headers, Route, RouteTable, Stream
from fleetplane.web.streaming import Streaming

log = structlog.get_logger(__name__)

JSON = "application/json"
NO_CONTENT = 204
ENVELOPE = "fleetplane.envelope"
"""The key in an ASGI scope of how the errors of its route look, where that is said."""
_JSON_TYPE = (b"content-type", JSON.encode())
_NO_STORE = (b"cache-control", b"no-store")
_ENCODER = msgspec.json.Encoder()
AnyRequest = Request[Any, Any, Any]


class Desk(Generic[C]):
    """Runs the handlers of one table."""

    def __init__(
        self, gate: Gate[C], answers: Answers, store: Store, *, strict_queries: bool = False
    ) -> None:
        self._strict_queries = strict_queries
        self._gate = gate
        self._answers = answers
        self._store = store

    async def serve(self, route: Route, request: AnyRequest) -> Reply | Streaming:
        elsewhere: Callable[[], FleetplaneError] | None
        elsewhere = request.scope.get(READS_ONLY)  # type: ignore[assignment]
        if elsewhere is None:
            return await self._serve(route, request)
        if route.needs is Needs.ACTIVE:
            raise elsewhere()
        with self._store.writing_here() if route.needs is Needs.WRITES else nullcontext():
            return await self._serve(route, request)

    async def _serve(self, route: Route, request: AnyRequest) -> Reply | Streaming:
        arrival: Arrival[C] = request.scope[ARRIVAL]  # type: ignore[literal-required]
        path = {name: str(value) for name, value in request.path_params.items()}
        scope = ""
        if not route.public:
            if arrival.caller is None:
                assert arrival.refused is not None
                raise arrival.refused
            scope = self._gate.admit(arrival.caller, route.permission, path)
        body = b"" if route.body is None else await request.body()
        headers = arrival.headers
        query, many = _query(request, route)
        if self._strict_queries and not route.open_query:
            _refuse_unknown(query, route)
        call = Call(
            request_id=arrival.request_id,
            address=arrival.address,
            scope=scope,
            path=path,
            query=query,
            many=many,
            headers=headers,
            body=_shaped(route, body, headers),
            _caller=arrival.caller,
        )
        key = headers.get("idempotency-key") if route.method == "POST" else None
        if key is None or arrival.caller is None or (route.streams and not route.begins_once):
            return await self._answer(route, call)
        what = f"POST {request.url.path}"
        if asked := request.scope["query_string"]:  # such as another scope: another request
            what += f"?{asked.decode('latin-1')}"
        digest = self._answers.digest(arrival.caller.name, what, key)
        return await self._once(route, call, digest, body)

    async def _once(self, route: Route, call: Call[C], digest: str, body: bytes) -> Reply | Streaming:
        def encode(content: Any) -> bytes:
            return _encoded(route, content)

        using = self._answers.running(
            digest, body, caller=call.caller.name, status=route.status, encode=encode
        )
        with using as once:
            kept = await self._answers.find(once)
            if kept is not None:
                return _again(route, call, kept)
            try:
                answer = await route.handler(replace(call, receipt=once))
                kept_answer = answer.beginning if isinstance(answer, Stream) else answer
                assert kept_answer is not None, "what goes on cannot be kept"
                await self._answers.keep(once, kept_answer)
            except FleetplaneError:
                kept = await self._answers.find(once)
                if kept is None:
                    raise
                return _again(route, call, kept)  # of the server that was faster
            if isinstance(answer, Stream):
                return self._streaming(route, call, answer)
            return Reply(route.status, answer.headers, encode(answer.content))

    async def _answer(self, route: Route, call: Call[C]) -> Reply | Streaming:
        answer = await route.handler(call)
        if isinstance(answer, Stream):
            return self._streaming(route, call, answer)
        body = _encoded(route, answer.content)
        return Reply(answer.status or route.status, answer.headers, body, cookies=answer.cookies)

    def _streaming(self, route: Route, call: Call[C], answer: Stream) -> Streaming:
        def check() -> None:
            """Whoever could not begin to read any more does not read on."""
            if not route.public:
                caller = self._gate.authenticate(call.headers)
                self._gate.admit(caller, route.permission, call.path)

        return Streaming(route.status, answer.headers, answer.content_type, answer.chunks, check=check)


def _encoded(route: Route, content: Any) -> bytes:
    return b"" if route.answer_shape is None else _ENCODER.encode(content)


class Reply(ASGIResponse):
    """An answer that exists as bytes: nothing is left to be negotiated, converted or looked up."""

    def __init__(
        self, status: int, headers: Mapping[str, str], body: bytes, *, cookies: Sequence[str] = ()
    ) -> None:
        self.status_code = status
        self.given = headers
        self.cookies = cookies
        self.body = body

    async def __call__(self, _scope: object, _receive: object, send: Send) -> None:  # type: ignore[override]
        headers = [(name.encode(), value.encode()) for name, value in self.given.items()]
        headers.extend((b"set-cookie", cookie.encode()) for cookie in self.cookies)
        headers.append(_NO_STORE)
        if self.status_code != NO_CONTENT:
            if "content-type" not in self.given:
                headers.append(_JSON_TYPE)
            headers.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


def _again(route: Route, call: Call[Any], kept: KeptAnswer) -> Reply:
    """An answer that was given before, to whoever might still be given it."""
    if route.recheck is not None:
        route.recheck(call)
    return Reply(kept.status, {**kept.headers, "idempotency-replayed": "true"}, kept.body)


def _query(request: AnyRequest, route: Route) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Single values, and those of parameters that may have many.

    Any other that is given twice could mean either, and is refused.
    """
    found: dict[str, str] = {}
    many: dict[str, list[str]] = {query.name: [] for query in route.query if query.many}
    if not request.scope["query_string"]:
        return found, many
    for name, value in request.query_params.multi_items():
        if name in many:
            many[name].append(str(value))
            continue
        if name in found:
            raise Rejected(Problem(field=name, message="Given more than once"))
        found[name] = str(value)
    return found, many


def _refuse_unknown(query: Mapping[str, str], route: Route) -> None:
    """Parameters that a route does not declare, each by its name, with those that it does."""
    known = [one.name for one in route.query]
    told = f"Unknown parameter; known: {', '.join(sorted(known))}" if known else "Unknown parameter"
    problems = [
        Problem(field=name, message=told, code=Code.UNKNOWN_FIELD)
        for name in sorted(query)
        if name not in known
    ]
    if problems:
        raise Rejected(*problems)


def _shaped(route: Route, body: bytes, headers: Headers) -> Any:
    if route.body is None or (route.body_optional and not body):
        return None
    kind = (headers.get("content-type") or "").partition(";")[0].strip().lower()
    if body and kind != JSON and not kind.endswith("+json"):
        raise Rejected(Problem(field="content-type", message=f"Must be {JSON}", code=Code.INCOMPATIBLE))
    return bodies.decode(body, route.body)


def application(
    table: RouteTable,
    *,
    gate: Gate[C],
    answers: Answers,
    store: Store,
    clock: Clock,
    requests_per_minute: int,
    envelope: Envelope = refusal,
    debug: bool = False,
) -> Gateway[C]:
    """Everything of one table, ready to be mounted at its prefix; `envelope` says how errors look."""
    desk = Desk(gate, answers, store, strict_queries=table.strict_queries)
    error = partial(_error, envelope)
    site = Litestar(
        route_handlers=[_bound(desk, table.prefix, route) for route in table.routes],
        exception_handlers={HTTPException: partial(_framework_error, error), Exception: error},
        openapi_config=None,
        logging_config=None,
        debug=debug,
    )
    return Gateway(
        site,  # type: ignore[arg-type]  # Litestar is an ASGI application, in other words
        gate,
        clock,
        requests_per_minute=requests_per_minute,
        envelope=envelope,
    )


def _bound(desk: Desk[C], prefix: str, route: Route) -> HTTPRouteHandler:
    async def handle(request: AnyRequest) -> ASGIResponse:  # one word: Litestar takes no choice of them
        scope: dict[str, Any] = request.scope  # type: ignore[assignment]  # which takes what we add
        scope[HANDLER] = f"{route.method} {prefix}{route.path}"
        if route.envelope is not None:
            request.scope[ENVELOPE] = route.envelope  # type: ignore[literal-required]
        return await desk.serve(route, request)

    return HTTPRouteHandler(
        prefix + route.path.replace("}", ":str}"),
        http_method=[route.method],  # type: ignore[list-item]  # the table's words are HTTP's
        status_code=200,  # of answers that say nothing else; ours always do
        name=route.name,
    )(handle)


def _error(envelope: Envelope, request: AnyRequest, error: Exception) -> Response[bytes]:
    arrival: Arrival[Any] = request.scope[ARRIVAL]  # type: ignore[literal-required]
    told = request.scope.get(ENVELOPE, envelope)(error, arrival.request_id)  # type: ignore[operator]
    if isinstance(error, OutcomeUnknown):  # the store has said why it does not know
        log.warning("web.outcome_unknown", request_id=arrival.request_id, path=request.url.path)
    elif not isinstance(error, FleetplaneError) or told.status == 500:
        log.error("web.failed", request_id=arrival.request_id, path=request.url.path, exc_info=error)
    return Response(told.body, status_code=told.status, headers=told.headers, media_type=JSON)


def _framework_error(
    tell: Callable[[AnyRequest, Exception], Response[bytes]], request: AnyRequest, error: HTTPException
) -> Response[bytes]:
    """What Litestar itself refuses: unknown paths and methods, unreadable requests."""
    meaning: Exception = error
    match error.status_code:
        case 404:
            meaning = NotFound(f"there is nothing at {request.url.path}")
        case 405:
            meaning = MethodNotAllowed(f"{request.method} is not allowed here")
        case 400 | 413:
            meaning = Rejected(Problem(field="", message=error.detail))
    answer = tell(request, meaning)
    if error.headers:
        answer.headers.update(error.headers)
    return answer
