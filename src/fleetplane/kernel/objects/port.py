"""The contract of object storage, for every back end.

A put is whole or not at all, and durable when it returns. Of several conditional puts with the
same condition one succeeds; the others get `Conflict`. A put whose answer was lost may have
happened: a conditional one that is tried again then conflicts with itself, so read before
concluding anything. Paths are relative, with `/` between their segments, and mean the same
everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleetplane.kernel.errors import InvalidArgument, ResourceExhausted

OBJECT_LIMIT_BYTES = 16 * 1024 * 1024
"""Of one object: they are read and written whole, in memory."""
LIST_LIMIT = 10_000
"""Paths in one list; ten requests to S3, a megabyte at most."""
PATH_LIMIT_BYTES = 1024  # S3's limit for keys
SEGMENT_LIMIT_BYTES = 255  # the usual file system's limit for names
RESERVED = ".objects"
"""The first segment that no path may have: storage keeps its own things there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    body: bytes
    etag: str
    """Names this very content to `if_match`; opaque, and comparable within one storage only."""
    modified_at_ns: int


class Objects(Protocol):
    async def get(self, path: str) -> StoredObject | None: ...

    async def put(
        self, path: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        """Write an object and return its etag.

        With `if_absent` only if there is none; with `if_match` only over the one with that etag.
        """
        ...

    async def delete(self, path: str) -> None:
        """Remove an object. There is nothing wrong with removing what is not there."""
        ...

    async def list(self, prefix: str = "") -> Sequence[str]:
        """The paths of all objects below a folder, sorted."""
        ...


def check_path(path: str) -> str:
    """Refuse a path that could escape, or would not mean the same everywhere."""
    segments = path.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or segments[0] == RESERVED:
        raise InvalidArgument(f"{path!r} is not a path within the storage", field="path")
    if not path.isprintable() or "\\" in path:
        raise InvalidArgument(f"{path!r} has characters that paths may not have", field="path")
    if len(path.encode()) > PATH_LIMIT_BYTES or any(
        len(segment.encode()) > SEGMENT_LIMIT_BYTES for segment in segments
    ):
        raise InvalidArgument(f"the path {path[:40]!r}… is too long", field="path")
    return path


def check_prefix(prefix: str) -> str:
    """A folder, with or without a slash at its end; empty for all."""
    bare = prefix.removesuffix("/")
    return check_path(bare) if bare else ""


def check_put(path: str, body: bytes, limit_bytes: int, *, if_absent: bool, if_match: str | None) -> None:
    check_path(path)
    if if_absent and if_match is not None:
        raise InvalidArgument("an object cannot be absent and match something", field="if_match")
    check_size(path, len(body), limit_bytes)


def check_size(path: str, size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise ResourceExhausted(f"{path} takes {size} bytes, more than the {limit_bytes} of one object")


def check_count(prefix: str, count: int) -> None:
    if count > LIST_LIMIT:
        raise ResourceExhausted(f"there are more than {LIST_LIMIT} objects in {prefix or 'the storage'}")
