"""What the REST modules of boards share: callers, errors, numbers, pages and the base of all answers.

Known clients read two shapes of errors: `{"error": title, "message": text}` everywhere, and
`{"error": text, "code": CODE}` where boards are provisioned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Generic, TypeVar

import msgspec
from google.protobuf.message import Message as ProtoMessage
from msgspec import UNSET, UnsetType

from fleetplane.domains.boards.kinds import NUMBER_LIMIT
from fleetplane.domains.boards.wire import message_json
from fleetplane.kernel.access import Principal
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.values.times import spelled_or_null
from fleetplane.web.rest.bodies import given as sent
from fleetplane.web.rest.gate import RoleGate
from fleetplane.web.rest.pages import decimal, whole_number
from fleetplane.web.rest.problems import Envelope, Refusal, Rejected, refusal
from fleetplane.web.rest.routes import Call, Query

V = TypeVar("V")


class BoardShape(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an answer. Field order is the order on the wire."""


S = TypeVar("S", bound=msgspec.Struct)


def projected(shape: type[S], *sources: object, **given: object) -> S:
    """A shape whose fields are `given`, or attributes of the same names of the first source that has them.

    A moment such as `created_at` is read from `created_at_ns`.
    """
    fields = shape.__struct_fields__
    return shape(**message_json.gathered(fields, sources, given, moment=spelled_or_null))


def spelled_as(message: ProtoMessage, shape: type[S], **further: object) -> S:
    """A message of gRPC as a shape that has its fields, with what REST adds to them."""
    return msgspec.convert({**message_json.plain(message), **further}, shape)


class Data(BoardShape, Generic[V], frozen=True, kw_only=True):
    """One thing, in its wrapping."""

    data: V


class Rows(BoardShape, Generic[V], frozen=True, kw_only=True):
    """One page of rows, with what a reader needs to ask for the next."""

    data: Sequence[V]
    count: int
    total: int
    limit: int
    offset: int


class Message(BoardShape, frozen=True, kw_only=True):
    message: str


class BoardError(BoardShape, frozen=True, kw_only=True):
    """Every refusal. Where boards are provisioned, `error` is the message and `code` names its kind."""

    error: str
    code: str | UnsetType = UNSET
    message: str
    request_id: str
    reason: str | UnsetType = UNSET
    field: str | UnsetType = UNSET
    hint: str | UnsetType = UNSET
    cause: str | UnsetType = UNSET


T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)
R = TypeVar("R")

CREATED, ACCEPTED, NO_CONTENT = 201, 202, 204
PAGE, PAGE_LIMIT = 50, 1000
OFFSET_LIMIT = NUMBER_LIMIT
PAGING: Sequence[Query] = (
    Query(
        name="limit", summary="Maximum number of rows", kind="integer", default=PAGE, low=0, high=PAGE_LIMIT
    ),
    Query(name="offset", summary="Number of rows to skip", kind="integer", default=0, low=0),
)


def changes(patch: msgspec.Struct) -> dict[str, Any]:
    """The fields that a partial update names; known clients write null for what is left alone."""
    return {name: value for name, value in sent(patch).items() if value is not None}


# Who calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardCaller:
    principal: Principal
    user: str = ""
    """Of a person who logged in here: the number of its record."""
    login: str = ""
    """Which of its logins this is."""

    @property
    def name(self) -> str:
        return self.principal.name


BoardCall = Call[BoardCaller]
BoardGate = RoleGate[BoardCaller]


def actor(call: BoardCall) -> str:
    return call.signed(call.caller.name)


# What they send.


def number_in(call: BoardCall, name: str = "id") -> int:
    """The number that a path names."""
    text = call.path[name]
    number = decimal(text, low=1, high=NUMBER_LIMIT)
    if number is None:
        raise InvalidArgument(f"{text[:32]!r} is not a positive number", field=name)
    return number


def reference(call: BoardCall, name: str) -> int | None:
    """A number in the query, if it is given."""
    if name not in call.query:
        return None
    return whole_number(call, name, default=0, low=1, high=NUMBER_LIMIT)


def choice(call: BoardCall, name: str, of: type[E]) -> E | None:
    text = call.query.get(name)
    return None if text is None else chosen(text, name, of)


def chosen(text: str, name: str, of: type[E]) -> E:
    try:
        return of(text)
    except ValueError:
        raise InvalidArgument(f"{text[:64]!r} is not one of {', '.join(of)}", field=name) from None


def flag(call: BoardCall, name: str) -> bool:
    match call.query.get(name):
        case None | "false" | "0":
            return False
        case "true" | "1" | "":
            return True
    raise InvalidArgument("must be true or false", field=name)


# Pages.


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetPage:
    limit: int
    offset: int

    def of(self, rows: Sequence[T]) -> Sequence[T]:
        return rows[self.offset : self.offset + self.limit]


def page_in(call: BoardCall) -> OffsetPage:
    return OffsetPage(
        limit=whole_number(call, "limit", default=PAGE, low=0, high=PAGE_LIMIT),
        offset=whole_number(call, "offset", default=0, low=0, high=OFFSET_LIMIT),
    )


def listed(call: BoardCall, rows: Sequence[T], show: Callable[[T], V], into: Callable[..., R]) -> R:
    """One page as a shape of `Rows`, with what a reader needs to ask for the next."""
    page = page_in(call)
    shown = [show(row) for row in page.of(rows)]
    return into(data=shown, count=len(shown), total=len(rows), limit=page.limit, offset=page.offset)


# How errors look.


def envelope(error: BaseException, request_id: str) -> Refusal:
    status, headers, text = _judged(error, request_id)
    body = _refused(error, request_id, title=HTTPStatus(status).phrase, text=text)
    return Refusal(status=status, body=msgspec.json.encode(body) + b"\n", headers=headers)


def provisioning_envelope(failure: str) -> Envelope:
    """For routes of provisioning; `failure` is the code of what goes wrong on the way."""

    def told(error: BaseException, request_id: str) -> Refusal:
        status, headers, text = _judged(error, request_id)
        is_id = isinstance(error, FleetplaneError) and error.field == "id"
        code = "INVALID_ID" if status == HTTPStatus.BAD_REQUEST and is_id else _CODES.get(status, failure)
        body = _refused(error, request_id, title=text, text=text, code=code)
        return Refusal(status=status, body=msgspec.json.encode(body) + b"\n", headers=headers)

    return told


_CODES: Mapping[int, str] = {
    HTTPStatus.BAD_REQUEST: "INVALID_REQUEST",
    HTTPStatus.UNAUTHORIZED: "UNAUTHORIZED",
    HTTPStatus.FORBIDDEN: "FORBIDDEN",
    HTTPStatus.NOT_FOUND: "NOT_FOUND",
    HTTPStatus.METHOD_NOT_ALLOWED: "METHOD_NOT_ALLOWED",
    HTTPStatus.CONFLICT: "CONFLICT",
    HTTPStatus.TOO_MANY_REQUESTS: "RATE_LIMITED",
}


def _judged(error: BaseException, request_id: str) -> tuple[int, Mapping[str, str], str]:
    """The status, the headers, and one line that says what is wrong and where."""
    told = refusal(error, request_id)
    if not isinstance(error, FleetplaneError):
        return told.status, told.headers, "something unforeseen happened; the server's log says what"
    text = error.message
    if isinstance(error, Rejected):
        text = "; ".join(f"{problem.field}: {problem.message}".lstrip(": ") for problem in error.problems)
    elif isinstance(error, InvalidArgument) and error.field and error.field not in text:
        text = f"{error.field}: {text}"
    return error.http_status, told.headers, text


def _refused(
    error: BaseException, request_id: str, *, title: str, text: str, code: str | UnsetType = UNSET
) -> BoardError:
    """For programs and for people who want to know more; absent where there is nothing to say."""
    if not isinstance(error, FleetplaneError):
        return BoardError(error=title, code=code, message=text, request_id=request_id)
    return BoardError(
        error=title,
        code=code,
        message=text,
        request_id=request_id,
        reason=error.reason or UNSET,
        field=error.field or UNSET,
        hint=error.advice or UNSET,
        cause=error.details.get("cause") or UNSET,
    )
