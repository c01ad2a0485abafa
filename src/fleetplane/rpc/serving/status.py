"""How a call ended, and how that is written in trailers.

Translates the error tree into gRPC once: code, text, and a `google.rpc.Status` whose details a
program can act on. Also decides which endings are worth an operator's attention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.rpc.serving.metadata import Header, encode_binary

DOMAIN: Final = "fleetplane"
"""The `ErrorInfo.domain` under which our reasons are unique."""

_MESSAGE_LIMIT_BYTES = 2048
# Header lists are bounded on the client's side too (8 KiB is a common ceiling), and a message
# that does not fit would hide the status itself. Percent-encoding can triple it.
_DETAILS_LIMIT_BYTES = 4096
_ESCAPED: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")

CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
"""grpc's own enumeration, by number."""
CODE_NAMES: Final = {number: code.name for number, code in CODES.items()}

OK: Final = 0
CANCELLED: Final = 1
UNKNOWN: Final = 2
INVALID_ARGUMENT: Final = 3
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14
UNAUTHENTICATED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcStatus:
    code: int
    message: str = ""
    details: bytes = b""
    """A serialized `google.rpc.Status`, or nothing."""
    level: str = ""
    """Of its line in the log, where that does not follow from the code."""

    def headers(self) -> list[Header]:
        """The status as trailing fields."""
        fields = [(b"grpc-status", b"%d" % self.code)]
        if self.message:
            fields.append((b"grpc-message", encode_message(self.message)))
        if self.details:
            fields.append((b"grpc-status-details-bin", encode_binary(self.details)))
        return fields


def encode_message(text: str) -> bytes:
    """Percent-encode all but printable ASCII, as `grpc-message` asks; cut at a sane length."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > _MESSAGE_LIMIT_BYTES:
        raw = raw[:_MESSAGE_LIMIT_BYTES].decode("utf-8", "ignore").encode() + "…".encode()
    return _ESCAPED.sub(lambda found: b"%%%02X" % found.group()[0], raw)


def status_of(error: FleetplaneError) -> GrpcStatus:
    """The one translation of the error tree into gRPC."""
    rich = status_pb2.Status(code=error.grpc_code, message=error.message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.details)
    rich.details.add().Pack(info)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        rich.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        rich.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.advice:
        rich.details.add().Pack(error_details_pb2.LocalizedMessage(locale="en", message=error.advice))
    encoded = rich.SerializeToString()
    if len(encoded) > _DETAILS_LIMIT_BYTES:
        encoded = _without_ballast(error)
    return GrpcStatus(code=error.grpc_code, message=error.message, details=encoded)


def _without_ballast(error: FleetplaneError) -> bytes:
    """Reason and code alone: what programs branch on, when the rest would not fit into trailers."""
    lean = status_pb2.Status(code=error.grpc_code)
    lean.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    encoded: bytes = lean.SerializeToString()
    return encoded


_LEVELS: Final = {
    CANCELLED: "debug",
    UNKNOWN: "error",
    INTERNAL: "error",
    15: "error",  # DATA_LOSS
    DEADLINE_EXCEEDED: "warning",
    RESOURCE_EXHAUSTED: "warning",
    UNAVAILABLE: "warning",
}


def log_level(code: int) -> str:
    """Ours to fix is an error, ours to watch a warning, the caller's own doing is information."""
    return _LEVELS.get(code, "info")
