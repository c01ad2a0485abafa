"""What stands in the header fields of a call: timeouts, metadata, content types.

Pure functions from header bytes to values and back. Knows the names gRPC keeps for itself
and the ways binary values are written; knows no sockets and no calls.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Final

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
