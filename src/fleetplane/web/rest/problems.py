"""From the one error tree to the error envelope of REST, once.

    {"error": {"code", "message", "request_id", "details": [{"field", "message", "code"}]}}

Decides codes and statuses; knows no route and no framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    PermissionDenied,
    PreconditionFailed,
    ResourceExhausted,
    StorageFull,
    Unauthenticated,
    Unavailable,
)

DETAILS_LIMIT = 100
"""Findings told at once; who makes more mistakes hears of the rest after these."""
INVALID = "Request validation failed"


class Code(StrEnum):
    """The code of one problem."""

    INVALID_FORMAT = "INVALID_FORMAT"
    REQUIRED = "REQUIRED"
    UNKNOWN_FIELD = "UNKNOWN_FIELD"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    TOO_LONG = "TOO_LONG"
    TOO_MANY = "TOO_MANY"
    UNKNOWN_REFERENCE = "UNKNOWN_REFERENCE"
    NOT_UNIQUE = "NOT_UNIQUE"
    INCOMPATIBLE = "INCOMPATIBLE"
    IN_USE = "IN_USE"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One finding about one field, which is a dotted path such as `locations.0.upstream_id`."""

    field: str
    message: str
    code: Code = Code.INVALID_FORMAT


class Rejected(InvalidArgument):
    """The request is wrong in one or more places."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(INVALID, field=problems[0].field if problems else None)
        self.problems = problems


class ConflictBlocker(FailedPrecondition):
    """Something else would break: it names what."""

    def __init__(self, message: str, problems: Iterable[Problem]) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class MethodNotAllowed(FleetplaneError):
    grpc_code = 12
    http_status = 405
    reason = "METHOD_NOT_ALLOWED"


class TooSlow(FleetplaneError):
    """The request did not arrive in the time that one may take, or its client left before its end."""

    grpc_code = 4
    http_status = 408
    reason = "REQUEST_TIMEOUT"


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    request_id: str
    details: Sequence[Problem] = ()


class ErrorEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody


# The first class that an error is an instance of decides, so the narrow ones come first.
_TABLE: tuple[tuple[type[FleetplaneError], int, str], ...] = (
    (StorageFull, 503, "SERVICE_UNAVAILABLE"),
    (OutcomeUnknown, 500, "OUTCOME_UNKNOWN"),
    (PreconditionFailed, 412, "PRECONDITION_FAILED"),
    (Unauthenticated, 401, "UNAUTHORIZED"),
    (PermissionDenied, 403, "FORBIDDEN"),
    (NotFound, 404, "NOT_FOUND"),
    (InvalidArgument, 422, "VALIDATION_ERROR"),
    (AlreadyExists, 409, "CONFLICT"),
    (Conflict, 409, "CONFLICT"),
    (FailedPrecondition, 409, "CONFLICT"),
    (ResourceExhausted, 429, "RATE_LIMITED"),
    (Unavailable, 503, "SERVICE_UNAVAILABLE"),
    (MethodNotAllowed, 405, "METHOD_NOT_ALLOWED"),
    (TooSlow, 408, "REQUEST_TIMEOUT"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error as it goes out."""

    status: int
    body: bytes
    headers: Mapping[str, str]


Envelope = Callable[[BaseException, str], Refusal]
"""How errors of one table look, from the error and the request's id."""


def refusal(error: BaseException, request_id: str) -> Refusal:
    """The answer for an error. An unexpected error is answered without its message."""
    status, code, message = 500, "INTERNAL_ERROR", "An internal error occurred"
    details: Sequence[Problem] = ()
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    if isinstance(error, FleetplaneError):
        known = next(((status, code) for kind, status, code in _TABLE if isinstance(error, kind)), None)
        if known is not None:
            status, code = known
            message = INVALID if code == "VALIDATION_ERROR" else error.message
            details = _details(error)
        if error.retry_after_seconds is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_seconds)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    body = ErrorBody(code=code, message=message, request_id=request_id, details=details[:DETAILS_LIMIT])
    return Refusal(
        status=status, body=msgspec.json.encode(ErrorEnvelope(error=body)) + b"\n", headers=headers
    )


def _details(error: FleetplaneError) -> Sequence[Problem]:
    if isinstance(error, Rejected | ConflictBlocker):
        return error.problems
    if isinstance(error, AlreadyExists) and error.field:
        return (Problem(field=error.field, message=error.message, code=Code.NOT_UNIQUE),)
    if isinstance(error, InvalidArgument):
        return (Problem(field=error.field or "", message=error.message),)
    return ()
