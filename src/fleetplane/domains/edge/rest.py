"""What the REST rooms of edge daemons share: who acts for whom, which shape they want, pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from fleetplane.domains.edge.access import Caller, acting_for, seeing
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.kernel.resources import AnyResource
from fleetplane.web.problems import Refusal, Rejected, refusal
from fleetplane.web.routes import Call, Headers, Query

EdgeCall = Call[Caller]
R = TypeVar("R", bound=AnyResource)

CREATED, NO_CONTENT = 201, 204
SHAPES_HEADER = "x-aegis-shapes"
SHIPPED, DOCUMENTED = "shipped", "documented"
PAGE, PAGE_LIMIT = 50, 200
PAGING: Sequence[Query] = (
    Query(name="cursor", summary="`next_cursor` of the page before"),
    Query(name="limit", summary="Rows a page", kind="integer", default=PAGE, low=1, high=PAGE_LIMIT),
)


class Manner:
    """How one server talks to its callers."""

    def __init__(self, *, shipped: bool) -> None:
        self._shipped = shipped

    def is_shipped(self, headers: Headers) -> bool:
        """Whether this caller wants the shapes of the first command line."""
        asked = headers.get(SHAPES_HEADER)
        return self._shipped if asked is None else asked.strip().lower() == SHIPPED


def tenant(call: EdgeCall) -> str:
    return acting_for(call.caller, call.headers)


def visible(call: EdgeCall) -> str | None:
    """The tenant whose things the caller may see; None for all of them."""
    return seeing(call.caller, call.headers)


def actor(call: EdgeCall) -> str:
    return call.signed(call.caller.name)


def page(
    call: EdgeCall, rows: Sequence[R], show: Callable[[R], dict[str, Any]], *, newest_first: bool = False
) -> dict[str, Any]:
    """Rows in the order in which they were made, after the one that the cursor names.

    A cursor names a row's place and not its number, so what is added or removed meanwhile makes
    nobody miss a row or see one twice.
    """
    limit = number(call, "limit", default=PAGE, low=1, high=PAGE_LIMIT)
    after = _place(call.query.get("cursor"))
    by_place = {(row.created_revision, row.name): row for row in rows}
    wanted = sorted(
        (place for place in by_place if after is None or (place < after if newest_first else place > after)),
        reverse=newest_first,
    )[: limit + 1]
    cursor = _cursor(wanted[limit - 1]) if len(wanted) > limit else None
    return {"items": [show(by_place[place]) for place in wanted[:limit]], "next_cursor": cursor}


def number(call: EdgeCall, name: str, *, default: int, low: int, high: int) -> int:
    text = call.query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not text.isascii() or not low <= int(text[:9]) <= high:
        raise InvalidArgument(f"must be a whole number from {low} to {high}", field=name)
    return int(text)


def flag(call: EdgeCall, name: str) -> bool | None:
    match call.query.get(name):
        case None:
            return None
        case "true" | "1":
            return True
        case "false" | "0":
            return False
    raise InvalidArgument("must be true or false", field=name)


def _cursor(place: tuple[int, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(place)).rstrip(b"=").decode()


def _place(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        return msgspec.json.decode(raw, type=tuple[int, str])
    except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
        raise InvalidArgument("is none that this server gave out", field="cursor") from error


def envelope(error: BaseException, request_id: str) -> Refusal:
    """Errors with the fields of both shapes side by side."""
    told = refusal(error, request_id)
    body = msgspec.json.decode(told.body)
    status = 400 if isinstance(error, InvalidArgument) and told.status == 422 else told.status
    code = _CODES.get(status, "internal")
    cause = error.details.get("cause") if isinstance(error, FleetplaneError) else None
    message = body["error"]["message"]
    if isinstance(error, InvalidArgument):
        message = _words(error)
    body["error"] |= {"message": message} | ({"cause": cause} if cause else {})
    body |= {"status": status, "code": code, "message": message}
    return Refusal(status=status, body=msgspec.json.encode(body) + b"\n", headers=told.headers)


def _words(error: InvalidArgument) -> str:
    """Where and what, in one line, for clients that show only that."""
    if isinstance(error, Rejected):
        return "; ".join(f"{problem.field}: {problem.message}".lstrip(": ") for problem in error.problems)
    return f"{error.field}: {error.message}" if error.field else error.message


_CODES = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    429: "rate_limited",
    503: "unavailable",
}
