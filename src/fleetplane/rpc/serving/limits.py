"""The bounds of the gRPC layer, each with its arithmetic, and the names they are counted under."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CALLERS_TRACKED = 4096
"""Callers with their own token bucket, per method. About 200 bytes each: under 1 MB a method."""


class Bound(StrEnum):
    """Every bound of this layer that a caller can run into; each has a counter."""

    ACTIVE_CALLS = "active_calls"
    METHOD_CONCURRENCY = "method_concurrency"
    UNKNOWN_CALLERS = "unknown_callers"
    RATE = "rate"
    CALLERS_TRACKED = "callers_tracked"
    MESSAGE_BYTES = "message_bytes"
    METADATA_FIELDS = "metadata_fields"
    METADATA_BYTES = "metadata_bytes"
    CLEANUP_SECONDS = "cleanup_seconds"
    DRAIN_SECONDS = "drain_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLimits:
    """What one listener's gRPC application takes on."""

    max_request_bytes: int = 4 * 1024 * 1024
    """One message, after decompression: gRPC's own default. A method's row may say otherwise."""
    active_calls: int = 16_384
    """Calls running at once. A quiet watch costs about 10 KB here, so 16,384 of them stay under 200 MB."""
    metadata_fields: int = 96
    """Header fields of a request, gRPC's own included; a caller's own metadata is rarely ten."""
    metadata_bytes: int = 16 * 1024
    """Names and values together, as received: where grpc's own servers stop too."""
    watch_after_seconds: float = 0.05
    """Where departures are watched for: a handler busy for longer gets a watcher, and no other."""
    request_seconds: float = 60.0
    """The one message of a unary request must be here by then, whatever the deadline."""
    cleanup_seconds: float = 5.0
    """A cancelled handler may await in its `finally` blocks for this long before it is cancelled again."""
    last_word_seconds: float = 0.1
    """When the server stops, streams without an end of their own may still say so before they are ended."""
    retry_after_seconds: float = 0.25
    """Seconds that a caller refused by a limit should wait."""
