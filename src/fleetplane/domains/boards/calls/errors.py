"""Errors of calls from this server to a board's agent, as classes of the one error tree.

A board's own refusal comes back as what it was there: same class of error, same reason, same cause.
What no board said (nobody there, no answer in time, a failure without words) has classes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from fleetplane.rpc.serving.status import DOMAIN

TEXT_LIMIT: Final = 500
"""Characters kept of a board's error message."""
DETAILS_LIMIT: Final = 16
REASON_LIMIT: Final = 64
_DETAILS = "grpc-status-details-bin"


class BoardAway(Unavailable):
    """The board's address is unknown, or it has not reported for long."""

    reason = "BOARD_AWAY"


class BoardUnreachable(Unavailable):
    """There is no connection to the board's agent, or it broke."""

    reason = "BOARD_UNREACHABLE"
    hint = "see that the board is up, and that this server reaches its agent's port"


class BoardSilent(Unavailable):
    """No answer came in time. What was asked for may still have been done."""

    reason = "BOARD_SILENT"


class BoardFailed(Unavailable):
    """The agent answered with an error that says nothing more."""

    reason = "BOARD_FAILED"


class BoardRefused(PermissionDenied):
    """The agent does not take calls from this server."""

    reason = "BOARD_REFUSED"
    hint = "see that the board trusts this server's authority"


AWAY: Final = (BoardAway, BoardUnreachable, BoardSilent)
"""That say nothing about what was asked for, only about the way there."""

_BY_CODE: Final[Mapping[grpc.StatusCode, type[FleetplaneError]]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.ABORTED: Conflict,
    grpc.StatusCode.UNIMPLEMENTED: Unimplemented,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: BoardRefused,
}
_WITHOUT_WORDS: Final[Mapping[grpc.StatusCode, type[FleetplaneError]]] = {
    **_BY_CODE,
    grpc.StatusCode.UNAVAILABLE: BoardUnreachable,
    grpc.StatusCode.CANCELLED: BoardUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: BoardSilent,
}


def translated(error: grpc.aio.AioRpcError, *, board: int) -> FleetplaneError:
    """The error that a failed call to a board stands for."""
    words = (error.details() or "no further words")[:TEXT_LIMIT]
    info = _info(error)
    if info is None or info.reason == Unavailable.reason:  # one that is about to stop gives no other reason
        kind = _WITHOUT_WORDS.get(error.code(), BoardFailed)
        return kind(f"board {board}: {words}", details={"code": error.code().name})
    return refused(
        error.code(),
        words,
        board=board,
        reason=info.reason,
        details=dict(list(info.metadata.items())[:DETAILS_LIMIT]),
    )


def refused(
    code: grpc.StatusCode, words: str, *, board: int, reason: str, details: Mapping[str, str]
) -> FleetplaneError:
    """A board's own refusal."""
    kind = _BY_CODE.get(code, BoardFailed)
    said = {"reason": reason[:REASON_LIMIT]} if reason else {}
    return kind(f"board {board}: {words}", details={**details, **said, "board": str(board)})


def reason_of(error: FleetplaneError) -> str:
    """For programs: the board's own word if it gave one."""
    return error.details.get("reason", error.reason)


def _info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS and isinstance(value, bytes):
            return _unpacked(value)
    return None


def _unpacked(value: bytes) -> error_details_pb2.ErrorInfo | None:
    info = error_details_pb2.ErrorInfo()
    try:
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Unpack(info) and info.domain == DOMAIN:
                return info
    except DecodeError:
        return None
    return None
