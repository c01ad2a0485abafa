"""What the REST rooms of boards share: who calls, how errors look, numbers, pages.

Two shapes of errors are known to those who speak with us: `{"error": title, "message": text}`
everywhere, and `{"error": text, "code": CODE}` where boards are provisioned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec

from fleetplane.domains.boards.access import GRANTS
from fleetplane.domains.boards.kinds import NUMBER_LIMIT, SCOPE
from fleetplane.kernel.access import AccessTable, Permission, Principal
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.web.problems import Envelope, Refusal, Rejected, refusal
from fleetplane.web.routes import Call, Query

T = TypeVar("T")
E = TypeVar("E", bound=StrEnum)

CREATED, ACCEPTED, NO_CONTENT = 201, 202, 204
PAGE, PAGE_LIMIT = 50, 1000
OFFSET_LIMIT = NUMBER_LIMIT
PAGING: Sequence[Query] = (
    Query(name="limit", summary="Rows at most", kind="integer", default=PAGE, low=0, high=PAGE_LIMIT),
    Query(name="offset", summary="Rows to leave out first", kind="integer", default=0, low=0),
)
Json = dict[str, Any]


# Who calls.


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    principal: Principal
    user: str = ""
    """Of a person who logged in here: the number of its record."""
    login: str = ""
    """Which of its logins this is."""

    @property
    def name(self) -> str:
        return self.principal.name


BoardCall = Call[Caller]


class People(Protocol):
    """Whoever can tell who holds a bearer token."""

    def of_header(self, authorization: str | None) -> Caller:
        """Raises `Unauthenticated`."""
        ...


class Gatekeeper:
    """Who calls, and may they: the same permissions, by the same roles, as on the other listeners."""

    def __init__(self, people: People) -> None:
        self._people = people
        self._table = AccessTable(GRANTS)

    def require_complete(self, permissions: set[Permission]) -> None:
        self._table.require_complete(permissions)

    def authenticate(self, authorization: str | None) -> Caller:
        return self._people.of_header(authorization)

    def admit(self, caller: Caller, permission: Permission | None, _path: Mapping[str, str]) -> str:
        if permission is not None:
            self._table.check(caller.principal, permission, SCOPE)
        return SCOPE

    def may(self, caller: Caller, permission: Permission) -> bool:
        return self._table.allows(caller.principal, permission, SCOPE)


def actor(call: BoardCall) -> str:
    return call.signed(call.caller.name)


# What they send.


def number_in(call: BoardCall, name: str = "id") -> int:
    """The number that a path names."""
    text = call.path[name]
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text[:11]) <= NUMBER_LIMIT:
        raise InvalidArgument(f"{text[:32]!r} is no number of anything", field=name)
    return int(text)


def whole(call: BoardCall, name: str, *, default: int, low: int, high: int) -> int:
    text = call.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or not low <= int(text[:12]) <= high:
        raise InvalidArgument(f"must be a whole number from {low} to {high}", field=name)
    return int(text)


def reference(call: BoardCall, name: str) -> int | None:
    """A number in the query, if it is given."""
    if name not in call.query:
        return None
    return whole(call, name, default=0, low=1, high=NUMBER_LIMIT)


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
class Page:
    limit: int
    offset: int

    def of(self, rows: Sequence[T]) -> Sequence[T]:
        return rows[self.offset : self.offset + self.limit]


def page_in(call: BoardCall) -> Page:
    return Page(
        limit=whole(call, "limit", default=PAGE, low=0, high=PAGE_LIMIT),
        offset=whole(call, "offset", default=0, low=0, high=OFFSET_LIMIT),
    )


def listed(call: BoardCall, rows: Sequence[T], show: Callable[[T], Json], *, name: str = "data") -> Json:
    """One page under its name, with what a reader needs to ask for the next."""
    page = page_in(call)
    shown = [show(row) for row in page.of(rows)]
    return {
        name: shown,
        "count": len(shown),
        "total": len(rows),
        "limit": page.limit,
        "offset": page.offset,
    }


# How errors look.


def envelope(error: BaseException, request_id: str) -> Refusal:
    status, headers, text = _judged(error, request_id)
    body = {"error": HTTPStatus(status).phrase, "message": text, **_further(error, request_id)}
    return Refusal(status=status, body=msgspec.json.encode(body) + b"\n", headers=headers)


def provisioning_envelope(failure: str) -> Envelope:
    """For routes of provisioning; `failure` is the code of what goes wrong on the way."""

    def told(error: BaseException, request_id: str) -> Refusal:
        status, headers, text = _judged(error, request_id)
        is_id = isinstance(error, FleetplaneError) and error.field == "id"
        code = "INVALID_ID" if status == HTTPStatus.BAD_REQUEST and is_id else _CODES.get(status, failure)
        body = {"error": text, "code": code, "message": text, **_further(error, request_id)}
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


def _further(error: BaseException, request_id: str) -> Json:
    """For programs and for people who want to know more; absent where there is nothing to say."""
    more: Json = {"request_id": request_id}
    if isinstance(error, FleetplaneError):
        known = {"reason": error.reason, "field": error.field, "hint": error.advice}
        more |= {name: value for name, value in known.items() if value}
        if cause := error.details.get("cause"):
            more["cause"] = cause
    return more
