"""How a call ended, as trailers, and the header fields of a call: timeouts, metadata, content types.

Translates the error tree into gRPC once: code, text, and a `google.rpc.Status` whose details a
program can act on. Decides which endings are worth an operator's attention. Header fields are read and
written by pure functions that know the names reserved by gRPC and the encoding of binary values.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import grpc
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from fleetplane.kernel.errors import FleetplaneError

Header = tuple[bytes, bytes]
MetadatumValue = str | bytes

_UNITS: Final = {
    ord("H"): 3600.0,
    ord("M"): 60.0,
    ord("S"): 1.0,
    ord("m"): 1e-3,
    ord("u"): 1e-6,
    ord("n"): 1e-9,
}
_MAX_TIMEOUT_DIGITS = 8  # the protocol's own limit

# What a servicer neither reads as metadata nor may send as such.
_RESERVED: Final = frozenset(
    (b"content-type", b"te", b"host", b"content-length", b"connection", b"transfer-encoding", b"date")
)
_RESERVED_PREFIXES: Final = (b"grpc-", b":")
# These pass between servicers and clients although they look like the protocol's own.
_PASSED_THROUGH: Final = frozenset(
    (b"grpc-trace-bin", b"grpc-tags-bin", b"grpc-previous-rpc-attempts", b"grpc-status-details-bin")
)

_KEY: Final = re.compile(r"[0-9a-z_.\-]+\Z")
_ASCII_VALUE: Final = re.compile(rb"[\x20-\x7e]*\Z")


class MetadataError(ValueError):
    """A servicer gave metadata that cannot go on the wire."""


class BadTimeout(ValueError):
    """A grpc-timeout field that follows no rule of the protocol."""


def parse_timeout(value: bytes) -> float:
    """Seconds from a `grpc-timeout` field such as `250m`: at most eight digits and a unit."""
    digits = value[:-1]
    unit = _UNITS.get(value[-1]) if value else None
    if unit is None or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        raise BadTimeout("grpc-timeout is not digits and one of H M S m u n")
    return int(digits) * unit


def is_grpc_content_type(value: bytes) -> bool:
    """`application/grpc`, with any subtype or parameter; not gRPC-Web, which is another protocol."""
    if value == b"application/grpc":
        return True
    lowered = value.lower()
    return lowered.startswith(b"application/grpc") and lowered[16:17] in (b"", b"+", b";", b" ")


def decode_binary(value: bytes) -> bytes:
    """Base64 as peers write it: with padding or without."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError("a -bin value is not base64") from error


def encode_binary(value: bytes) -> bytes:
    return base64.b64encode(value).rstrip(b"=")


def is_reserved(name: bytes) -> bool:
    if name in _RESERVED:
        return True
    return name.startswith(_RESERVED_PREFIXES) and name not in _PASSED_THROUGH


def parse_metadata(headers: Iterable[Header]) -> tuple[tuple[str, MetadatumValue], ...]:
    """The caller's own metadata, in order. A binary field may carry several values, comma-joined.

    A value that cannot be read is left out rather than failing the call: it is the caller's
    metadata, and only a servicer that looks for it can say that it matters.
    """
    found: list[tuple[str, MetadatumValue]] = []
    for name, value in headers:
        if is_reserved(name):
            continue
        key = name.decode("latin-1")
        if not name.endswith(b"-bin"):
            found.append((key, value.decode("latin-1")))
            continue
        for part in value.split(b","):
            try:
                found.append((key, decode_binary(part.strip())))
            except ValueError:
                continue
    return tuple(found)


def encode_metadata(pairs: Iterable[tuple[str, MetadatumValue]]) -> list[Header]:
    """Header fields from a servicer's metadata, or MetadataError naming the offending key."""
    encoded: list[Header] = []
    for key, value in pairs:
        if not _KEY.match(key):
            raise MetadataError(f"illegal metadata key {key!r}: use lower-case letters, digits, _ . -")
        name = key.encode("ascii")
        if is_reserved(name):
            raise MetadataError(f"metadata key {key!r} belongs to the protocol")
        encoded.append((name, _encode_value(key, value)))
    return encoded


def _encode_value(key: str, value: MetadatumValue) -> bytes:
    if key.endswith("-bin"):
        if not isinstance(value, bytes):
            raise MetadataError(f"metadata {key!r} needs bytes: its name ends in -bin")
        return encode_binary(value)
    try:
        raw = value if isinstance(value, bytes) else value.encode("ascii")
    except UnicodeEncodeError as error:
        raise MetadataError(f"metadata {key!r} is not ASCII; use a key ending in -bin") from error
    if not _ASCII_VALUE.match(raw):
        raise MetadataError(f"metadata {key!r} holds control characters; use a key ending in -bin")
    return raw


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
