"""What the REST rooms of edge daemons share: who acts for whom, which shape they want, errors."""

from __future__ import annotations

import re

import msgspec

from fleetplane.domains.edge.access import acting_for, seeing
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.web.rest.gate import OperatorCaller
from fleetplane.web.rest.problems import ErrorBody, Refusal, Rejected, refusal
from fleetplane.web.rest.routes import Call, Headers

EdgeCall = Call[OperatorCaller]

CREATED, NO_CONTENT, BAD_REQUEST = 201, 204, 400
SHAPES_HEADER = "x-aegis-shapes"
ON_BEHALF = "x-fleetplane-on-behalf"
BEHALF_PATTERN = re.compile(r"[A-Za-z0-9._@/-]{1,128}")
SHIPPED, DOCUMENTED = "shipped", "documented"


class Manner:
    """The REST dialect of one server."""

    def __init__(self, *, shipped: bool) -> None:
        self._shipped = shipped

    def is_shipped(self, headers: Headers) -> bool:
        """Whether this caller wants the shapes of the first command line.

        That one says nothing about itself, not even its name, and asks for anything; other libraries name
        themselves.
        """
        asked = headers.get(SHAPES_HEADER)
        if asked is not None:
            return asked.strip().lower() == SHIPPED
        return self._shipped or (headers.get("accept") == "*/*" and not headers.get("user-agent"))


class EdgeErrorBody(ErrorBody, frozen=True, kw_only=True, omit_defaults=True):
    cause: str = ""
    """What an edge fleet's own scripts look for, such as `EdgeUnavailable`."""


class EdgeError(msgspec.Struct, frozen=True, kw_only=True):
    """Every refusal, with the fields of both shapes side by side."""

    error: EdgeErrorBody
    status: int
    code: str
    message: str


def tenant(call: EdgeCall) -> str:
    return acting_for(call.caller, call.headers)


def visible(call: EdgeCall) -> str | None:
    """The tenant whose things the caller may see; None for all of them."""
    return seeing(call.caller, call.headers)


def actor(call: EdgeCall) -> str:
    """Who is written down for a change; a server that passes calls on says for whom it does."""
    name, behalf = call.caller.name, call.headers.get(ON_BEHALF)
    if behalf and not call.caller.tenant and BEHALF_PATTERN.fullmatch(behalf):
        name = f"{name} for {behalf}"
    return call.signed(name)


def envelope(error: BaseException, request_id: str) -> Refusal:
    """Errors with the fields of both shapes side by side."""
    told = refusal(error, request_id)
    body = msgspec.json.decode(told.body)
    status = BAD_REQUEST if isinstance(error, InvalidArgument) and told.status == 422 else told.status
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
    BAD_REQUEST: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    409: "conflict",
    429: "rate_limited",
    503: "unavailable",
}
