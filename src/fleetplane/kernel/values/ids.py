"""Ids in their usual form. Randomness comes from the clock's side, so that a simulated run repeats."""

from __future__ import annotations

import uuid

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument

UUID_BYTES = 16


def new_uuid(clock: Clock) -> str:
    """A random UUID, hyphenated, in lower case."""
    return str(uuid.UUID(bytes=clock.token_bytes(UUID_BYTES), version=4))


def check_uuid(text: str, *, field: str) -> str:
    """A UUID in its usual form; returned in lower case."""
    try:
        found = str(uuid.UUID(text))
    except ValueError as error:
        raise InvalidArgument(f"{field} must be a UUID, not {text[:80]!r}", field=field) from error
    if found != text.lower():  # UUID() also takes braces, urn: and missing hyphens
        raise InvalidArgument(f"{field} must be a hyphenated UUID, not {text[:80]!r}", field=field)
    return found
