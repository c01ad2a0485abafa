"""Bodies, problems, times, paging, mounts: what every route stands on."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fleetplane.kernel import errors
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import FleetplaneError, SettingsError
from fleetplane.kernel.resources import Resource
from fleetplane.kernel.values.times import spelled as told
from fleetplane.web.documents import Documents, WebDocument
from fleetplane.web.ops import Mount, OpsApp, Readiness
from fleetplane.web.rest import bodies, family
from fleetplane.web.rest.app import application
from fleetplane.web.rest.gateway import Gateway, GatewayCollector
from fleetplane.web.rest.pages import Paging, in_order, listing
from fleetplane.web.rest.problems import Code, ConflictBlocker, Problem, Rejected, refusal
from fleetplane.web.rest.routes import (
    Answer,
    Call,
    Query,
    Route,
    RouteTable,
    etag,
    is_of_another_lineage,
    matches,
)


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    items: list[Inner]
    by_name: dict[str, int] = {}


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        (b"{}", "items", "REQUIRED"),
        (b'{"items": [{"number": 1}, {}]}', "items.1.number", "REQUIRED"),
        (b'{"items": [{"number": "1"}]}', "items.0.number", "INVALID_FORMAT"),
        (b'{"items": [{"number": 1, "x": 2}]}', "items.0.x", "UNKNOWN_FIELD"),
        (b'{"items": [], "by_name": {"a": "b"}}', "by_name", "INVALID_FORMAT"),
        (b"[]", "", "INVALID_FORMAT"),
        (b"{", "", "INVALID_FORMAT"),
        (b"", "", "REQUIRED"),
    ],
)
def test_a_body_that_does_not_fit_names_the_place(body: bytes, field: str, code: str) -> None:
    with pytest.raises(Rejected) as refused:
        bodies.decode(body, Outer)
    assert [(one.field, one.code) for one in refused.value.problems] == [(field, code)]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.Unauthenticated("x"), 401, "UNAUTHORIZED"),
        (errors.PermissionDenied("x"), 403, "FORBIDDEN"),
        (errors.NotFound("x"), 404, "NOT_FOUND"),
        (errors.InvalidArgument("x"), 422, "VALIDATION_ERROR"),
        (errors.AlreadyExists("x"), 409, "CONFLICT"),
        (errors.Conflict("x"), 409, "CONFLICT"),
        (errors.FailedPrecondition("x"), 409, "CONFLICT"),
        (errors.ResourceExhausted("x"), 429, "RATE_LIMITED"),
        (errors.StorageFull("x"), 503, "SERVICE_UNAVAILABLE"),
        (errors.Unavailable("x"), 503, "SERVICE_UNAVAILABLE"),
        (errors.IntegrityError("the disk lies"), 500, "INTERNAL_ERROR"),
        (FleetplaneError("a secret"), 500, "INTERNAL_ERROR"),
        (ValueError("a secret"), 500, "INTERNAL_ERROR"),
    ],
)
def test_every_error_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    told = refusal(error, "req-1")
    body = json.loads(told.body)["error"]
    assert (told.status, body["code"], body["request_id"]) == (status, code, "req-1")
    assert "secret" not in body["message"]


def test_details_name_fields_and_holders_and_are_bounded() -> None:
    many = [Problem(field=str(n), message="x", code=Code.IN_USE) for n in range(500)]
    assert len(json.loads(refusal(ConflictBlocker("in use", many), "r").body)["error"]["details"]) == 100
    taken = errors.AlreadyExists("taken", field="slug")
    assert json.loads(refusal(taken, "r").body)["error"]["details"] == [
        {"field": "slug", "message": "taken", "code": "NOT_UNIQUE"}
    ]


def test_a_refusal_says_when_to_come_back() -> None:
    told = refusal(errors.ResourceExhausted("x", retry_after_seconds=1.2), "r")
    assert told.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("2026-03-01T00:00:00Z", "2026-03-01T00:00:00Z"),
        ("2026-03-01T01:00:00+01:00", "2026-03-01T00:00:00Z"),
        ("2026-03-01T00:00:00.999999Z", "2026-03-01T00:00:00Z"),
    ],
)
def test_a_moment_is_read_with_its_zone_and_told_in_utc(text: str, spelled: str) -> None:
    assert told(bodies.parsed(text, field="from")) == spelled


@pytest.mark.parametrize(
    "text", ["", "now", "2026-03-01", "2026-03-01T00:00:00", "0001-01-01T00:00:00+23:59"]
)
def test_a_moment_that_could_be_anyones_is_refused(text: str) -> None:
    with pytest.raises(Rejected):
        bodies.parsed(text, field="from")


def resource(name: str, revision: int, generation: int = 1) -> Resource[int, int]:
    return Resource(
        kind="k",
        scope="",
        name=name,
        uid="0" * 32,
        labels={},
        spec=0,
        status=None,
        conditions=(),
        revision=revision,
        created_revision=revision,
        generation=generation,
        created_at_ns=0,
        updated_at_ns=0,
    )


def test_rows_are_in_the_order_of_their_making_whatever_the_clock_said() -> None:
    rows = in_order([resource("c", 2), resource("b", 1), resource("a", 2)])
    assert [row.name for row in rows] == ["b", "a", "c"]
    page = listing(rows, Paging(page=2, per_page=2), lambda row: row.name)
    assert (page.data, page.meta.total) == (["c"], 3)


def test_a_tag_changes_with_the_spec_and_is_compared_weakly() -> None:
    one, two = resource("a", 1), resource("a", 2, generation=2)
    assert etag(one) != etag(two)
    assert matches(None, one)
    assert matches("*", one)
    assert matches(etag(one).removeprefix("W/"), one)
    assert matches(f'"x" , {etag(one)}', one)
    assert not matches(etag(two), one)
    assert is_of_another_lineage(etag(two), one), "a later generation than there ever was"
    assert not is_of_another_lineage(etag(one), two), "merely old"
    for nothing in (None, "*", '"x"', 'W/"a-b-c"', etag(one)):
        assert not is_of_another_lineage(nothing, one)
    other = msgspec.structs.replace(two, spec=1)
    assert is_of_another_lineage(etag(two), other)
    assert not matches(etag(two), other), "the same generation, counted anew from a backup, of other content"


# Tables and documents.


async def nothing(_call: Call[Any]) -> Answer[None]:
    return Answer(content=None)


def route(**given: Any) -> Route:
    return Route(**{"method": "GET", "path": "/x", "handler": nothing, "summary": "x", "tag": "t", **given})


def test_a_table_refuses_two_routes_for_one_request_and_things_without_a_permission() -> None:
    with pytest.raises(SettingsError):
        RouteTable("/v1", [route(), route()])
    with pytest.raises(SettingsError):
        RouteTable("/v1", [route(path="/x/{id}")])
    assert RouteTable("/v1", [route(path="/x/{id}", permission=Permission("p"))]).permissions == {"p"}


def test_the_document_tells_parameters_bodies_and_answers() -> None:
    query = Query(name="page", summary="which", kind="integer", default=1, low=1, high=9)
    table = RouteTable(
        "/v1",
        [
            route(
                method="POST",
                path="/x/{id}",
                permission=Permission("p"),
                body=Outer,
                answer=Inner,
                status=201,
                query=(query,),
            ),
            route(public=True),
        ],
    )
    made = family.openapi_document(table, title="T", version="1", description="D")

    operation = made["paths"]["/x/{id}"]["post"]
    assert made["openapi"] == "3.1.0"
    assert [one["name"] for one in operation["parameters"]] == ["id", "page", "Idempotency-Key"]
    assert operation["parameters"][1]["schema"] == {
        "type": "integer",
        "default": 1,
        "minimum": 1,
        "maximum": 9,
    }
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Outer"
    }
    assert "201" in operation["responses"]
    assert made["components"]["schemas"]["Outer"]["additionalProperties"] is False
    assert made["paths"]["/x"]["get"]["security"] == []


def test_the_gateway_counts_its_answers_and_refusals() -> None:
    gateway: Gateway[Any] = Gateway(nothing, None, SystemClock())  # type: ignore[arg-type]
    gateway.answers.update({2: 3, 4: 1})
    registry = CollectorRegistry()
    registry.register(GatewayCollector(gateway, domain="d"))

    told = registry.get_sample_value
    assert told("fleetplane_web_answers_total", {"domain": "d", "status": "2xx"}) == 3
    assert told("fleetplane_web_answers_total", {"domain": "d", "status": "4xx"}) == 1
    assert told("fleetplane_web_rate_limited_total", {"domain": "d"}) == 0


# The front door.


async def test_mounted_applications_get_what_lies_below_their_path_and_nothing_else() -> None:
    pages = Documents({"/docs": WebDocument(content_type="text/plain", content=lambda: b"page")})
    seen = []

    async def api(scope: Any, _receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    door = OpsApp(CollectorRegistry(), version="1")
    door.mount([Mount(path="/v1", app=api, summary="the API"), Mount(path="/docs", app=pages)])
    door.readiness = Readiness.READY
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=door), base_url="http://x") as http:
        statuses = [
            (await http.get(path)).status_code for path in ("/v1", "/v1/a", "/v1x", "/readyz", "/docs")
        ]
        assert (await http.post("/docs")).headers["allow"] == "GET, HEAD"
        assert (await http.head("/docs")).content == b""
        told = (await http.get("/")).json()["paths"]

    assert statuses == [204, 204, 404, 200, 200]
    assert seen == ["/v1", "/v1/a"]
    assert told["/v1"] == "the API"
    assert "/docs" not in told


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (errors.OutcomeUnknown("the database does not say whether this was written"), "warning"),
        (errors.IntegrityError("the disk lies"), "error"),
        (errors.NotFound("x"), None),
    ],
)
async def test_an_outcome_that_nobody_knows_is_told_and_is_no_fault_of_the_program(
    error: FleetplaneError, level: str | None
) -> None:
    async def fails(_call: Call[Any]) -> Answer[None]:
        raise error

    route = Route(method="GET", path="/x", handler=fails, summary="x", tag="t", public=True)
    app = application(
        RouteTable("/v1", [route]),
        gate=Mock(),
        answers=Mock(),
        store=Mock(),
        clock=SystemClock(),
        requests_per_minute=9,
    )
    transport = httpx.ASGITransport(app=app)
    with capture_logs() as logged:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.get("/v1/x")
    assert answer.status_code == refusal(error, "").status
    assert [entry["log_level"] for entry in logged if entry["event"].startswith("web.")] == (
        [] if level is None else [level]
    )


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_of_the_program() -> None:
    async def never(_call: Call[Any]) -> Answer[None]:
        raise AssertionError

    route = Route(method="POST", path="/x", handler=never, summary="x", tag="t", public=True, body=Outer)
    app = application(
        RouteTable("/v1", [route]),
        gate=Mock(),
        answers=Mock(),
        store=Mock(),
        clock=SystemClock(),
        requests_per_minute=9,
    )
    events = iter(({"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}))
    sent: list[Any] = []

    async def receive() -> Any:
        return next(events)

    async def send(event: Any) -> None:
        sent.append(event)

    head = {"method": "POST", "path": "/v1/x", "raw_path": b"/v1/x", "root_path": "", "query_string": b""}
    scope = {"type": "http", "scheme": "http", "http_version": "1.1", "headers": [], "extensions": {}, **head}
    with capture_logs() as logged:
        await app({**scope, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}, receive, send)
    assert sent[0]["status"] == 408
    assert not [entry for entry in logged if entry["log_level"] == "error"]
