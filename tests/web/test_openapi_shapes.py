"""What the OpenAPI document makes of shapes that generators of clients cannot read as they are."""

from __future__ import annotations

from typing import Any

import msgspec

from fleetplane.kernel.access import Permission
from fleetplane.web.rest import family
from fleetplane.web.rest.bodies import NULL, JsonObjectOrNull, foreign
from fleetplane.web.rest.routes import Answer, Call, Route, RouteTable, Stream

READ = Permission("read")


class Everyone(msgspec.Struct, frozen=True, tag="all"):
    pass


class Some(msgspec.Struct, frozen=True, tag="some"):
    default: str = ""
    """Whose name is a word of schemas."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    pair: tuple[int, str]
    layer: JsonObjectOrNull
    whom: Everyone | Some = Everyone()


async def show(_call: Call[Any]) -> Answer[Shape]:
    raise NotImplementedError


async def follow(_call: Call[Any]) -> Stream:
    raise NotImplementedError


def document() -> dict[str, Any]:
    routes = (
        Route(method="GET", path="/a", handler=show, summary="A", tag="T", permission=READ, answer=Shape),
        Route(method="GET", path="/b", handler=follow, summary="B", tag="T", permission=READ, streams=True),
    )
    return family.openapi_document(RouteTable("/v1", routes), title="T", version="1", description="D")


def test_a_pair_is_an_array_of_two_without_items_that_no_generator_reads() -> None:
    pair = document()["components"]["schemas"]["Shape"]["properties"]["pair"]
    assert pair == {
        "type": "array",
        "minItems": 2,
        "maxItems": 2,
        "prefixItems": [{"type": "integer"}, {"type": "string"}],
    }


def test_a_default_that_is_an_object_is_told_in_words_and_a_field_of_that_name_stays() -> None:
    schemas = document()["components"]["schemas"]
    whom = schemas["Shape"]["properties"]["whom"]
    assert "default" not in whom
    assert whom["description"] == 'Default: {"type":"all"}'
    assert schemas["Some"]["properties"]["default"] == {"type": "string", "default": ""}


def test_a_route_that_only_streams_promises_no_json() -> None:
    told = document()["paths"]["/b"]["get"]["responses"]["200"]["content"]
    assert list(told) == ["text/event-stream"]


def test_a_document_of_somebody_else_is_described_and_written_as_answers_are() -> None:
    layer = document()["components"]["schemas"]["Shape"]["properties"]["layer"]
    assert layer == {"anyOf": [{"type": "object", "additionalProperties": {}}, {"type": "null"}]}
    made = Shape(pair=(1, "a"), layer=foreign(b'{ "a" : [1.0, null] }'))
    assert msgspec.json.encode(made) == b'{"pair":[1,"a"],"layer":{"a":[1.0,null]},"whom":{"type":"all"}}'
    assert msgspec.json.encode(Shape(pair=(1, "a"), layer=NULL)).startswith(b'{"pair":[1,"a"],"layer":null')
