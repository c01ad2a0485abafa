"""The one error tree.

A class carries everything an edge needs to answer with: the gRPC status code, the HTTP
status, a stable reason for programs and a hint for people. Errors are raised inside by
meaning; `fleetplane.rpc` and `fleetplane.web` translate them once, each for its own wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar


class FleetplaneError(Exception):
    """Anything that we know how to explain to a caller."""

    grpc_code: ClassVar[int] = 13  # INTERNAL
    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "INTERNAL"
    hint: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        retry_after_seconds: float | None = None,
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """The offending field of the request, as its caller spells it."""
        self.advice = hint if hint is not None else self.hint
        """What the caller could do about it."""
        self.retry_after_seconds = retry_after_seconds
        self.details = dict(details or {})

    def __repr__(self) -> str:
        where = f" field={self.field!r}" if self.field else ""
        return f"<{type(self).__name__} {self.reason}{where}: {self.message}>"


class InvalidArgument(FleetplaneError):
    """The request can never succeed as it stands."""

    grpc_code = 3
    http_status = 400
    reason = "INVALID_ARGUMENT"


class NotFound(FleetplaneError):
    grpc_code = 5
    http_status = 404
    reason = "NOT_FOUND"


class AlreadyExists(FleetplaneError):
    """The thing, or a unique value it claims, is taken."""

    grpc_code = 6
    http_status = 409
    reason = "ALREADY_EXISTS"


class PermissionDenied(FleetplaneError):
    grpc_code = 7
    http_status = 403
    reason = "PERMISSION_DENIED"


class Unauthenticated(FleetplaneError):
    grpc_code = 16
    http_status = 401
    reason = "UNAUTHENTICATED"


class ResourceExhausted(FleetplaneError):
    """A limit was hit; the message names which."""

    grpc_code = 8
    http_status = 429
    reason = "RESOURCE_EXHAUSTED"


class StorageFull(ResourceExhausted):
    """The disk took no more. Nothing was written; reads go on."""

    http_status = 503
    reason = "STORAGE_FULL"
    hint = "free space on the data directory's file system, then retry"


class FailedPrecondition(FleetplaneError):
    grpc_code = 9
    http_status = 409
    reason = "FAILED_PRECONDITION"


class PreconditionFailed(FailedPrecondition):
    """What the caller has seen is not of this store: it was lost before a backup was restored."""

    http_status = 412
    reason = "PRECONDITION_FAILED"
    hint = "read the current state and retry"


class Conflict(FleetplaneError):
    """Someone else changed the thing first: read it again and retry."""

    grpc_code = 10  # ABORTED
    http_status = 409
    reason = "CONFLICT"
    hint = "read the current state and retry"


class Compacted(FleetplaneError):
    """The asked-for revision is no longer kept, or has never been."""

    grpc_code = 11  # OUT_OF_RANGE
    http_status = 410
    reason = "COMPACTED"
    hint = "list again and watch from the revision of that list"


class Unimplemented(FleetplaneError):
    grpc_code = 12
    http_status = 501
    reason = "UNIMPLEMENTED"


class Unavailable(FleetplaneError):
    """The call cannot be served now; the same call may succeed later."""

    grpc_code = 14
    http_status = 503
    reason = "UNAVAILABLE"


class OutcomeUnknown(Unavailable):
    """The outcome is unknown: the change may show, now or after a restart."""

    grpc_code = 2  # UNKNOWN: not UNAVAILABLE, which clients repeat by themselves
    http_status = 500
    reason = "OUTCOME_UNKNOWN"
    hint = "read before trying again"


class SettingsError(FleetplaneError):
    """The configuration cannot be used; the message names the key and the nearest known one."""

    grpc_code = 3
    http_status = 400
    reason = "BAD_SETTINGS"


class IntegrityError(FleetplaneError):
    """Stored data is not what was written: a broken audit chain, a wrong master key."""

    grpc_code = 15  # DATA_LOSS
    http_status = 500
    reason = "INTEGRITY"
