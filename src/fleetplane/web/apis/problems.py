"""Errors of the resource API: problem details of RFC 9457, once for every route.

    {"type", "title", "status", "detail", "reason", "field", "hint", "requestId",
     "errors": [{"field", "detail"}]}

`reason` is one word that stays the same, for programs; `detail` and `hint` are for people. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from fleetplane.kernel.errors import FleetplaneError, InvalidArgument
from fleetplane.web.rest.problems import DETAILS_LIMIT, ConflictBlocker, Refusal, Rejected

CONTENT_TYPE = "application/problem+json"
INTERNAL = "Internal"


class ProblemField(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What is wrong with one field."""

    field: str
    detail: str


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Why a request was refused, as RFC 9457 has it."""

    title: str
    status: int
    detail: str
    reason: str
    """One word for programs, such as `NotFound`."""
    request_id: str
    type: str = "about:blank"
    field: str = ""
    """The part of the request that is wrong, if it is one."""
    hint: str = ""
    """What to do about it."""
    errors: Sequence[ProblemField] = ()
    """Every field that is wrong, if several are."""


def problem(error: BaseException, request_id: str) -> Refusal:
    """The answer for an error. An unexpected one is answered without its message."""
    headers = {"content-type": CONTENT_TYPE, "cache-control": "no-store"}
    details = _details(error, request_id)
    if isinstance(error, FleetplaneError) and error.retry_after_seconds is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if details.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    return Refusal(status=details.status, body=msgspec.json.encode(details) + b"\n", headers=headers)


def _details(error: BaseException, request_id: str) -> ProblemDetails:
    if not isinstance(error, FleetplaneError) or error.reason == FleetplaneError.reason:
        return ProblemDetails(
            title=HTTPStatus.INTERNAL_SERVER_ERROR.phrase,
            status=HTTPStatus.INTERNAL_SERVER_ERROR,
            detail="an internal error occurred; the server's log has it under the request's id",
            reason=INTERNAL,
            request_id=request_id,
        )
    found = error.problems if isinstance(error, Rejected | ConflictBlocker) else ()
    detail = error.message
    if len(found) == 1 and isinstance(error, InvalidArgument):
        detail = found[0].message
    return ProblemDetails(
        title=HTTPStatus(error.http_status).phrase,
        status=error.http_status,
        detail=detail,
        reason=one_word(error.reason),
        field=error.field or "",
        hint=error.advice,
        request_id=request_id,
        errors=[ProblemField(field=one.field, detail=one.message) for one in found[:DETAILS_LIMIT]],
    )


def one_word(reason: str) -> str:
    """`NOT_FOUND` as one word: `NotFound`."""
    return "".join(part.capitalize() for part in reason.split("_"))
