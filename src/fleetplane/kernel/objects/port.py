"""The contract of object storage for every back end, and objects whose content is recorded in the store.

A put is whole or not at all, and durable when it returns. Of several conditional puts with the
same condition one succeeds; the others get `Conflict`. A put whose answer was lost may have
happened: a conditional one that is tried again then conflicts with itself, so read before
concluding anything. Paths are relative, with `/` between their segments, and mean the same
everywhere.

Operators may put documents, user data and files directly into the storage. So the digest of each object is
recorded before its content is used: changed content has an entry in the audit log, and `audit verify` names
what changed since its last use.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, ResourceExhausted
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

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


log = structlog.get_logger(__name__)

ACTOR = "system/objects"
SHOWN = 5
"""Objects named where recorded ones differ."""


class ObjectRecord(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str
    """Of the content that was last used or written."""


OBJECT: Kind[ObjectRecord, Nothing] = Kind("stored-object", ObjectRecord, Nothing)
"""By its path."""


class RecordedObjects:
    def __init__(self, objects: Objects, store: Store) -> None:
        self._objects = objects
        self._store = store

    def __repr__(self) -> str:
        return f"<RecordedObjects {self._objects!r}>"

    async def get(self, path: str) -> StoredObject | None:
        found = await self._objects.get(path)
        if found is not None:
            await self._record(path, await asyncio.to_thread(digest, found.body))
        return found

    async def put(
        self, path: str, body: bytes, *, if_absent: bool = False, if_match: str | None = None
    ) -> str:
        etag = await self._objects.put(path, body, if_absent=if_absent, if_match=if_match)
        await self._record(path, digest(body))
        return etag

    async def delete(self, path: str) -> None:
        await self._objects.delete(path)
        await self._record(path, "")

    async def list(self, prefix: str = "") -> Sequence[str]:
        return await self._objects.list(prefix)

    async def accept(self) -> None:
        """Record all that was ever used as it is now: an operator says that it is right."""
        for record in self._store.list(OBJECT):
            if await self.get(record.name) is None:
                await self._record(record.name, "")

    async def _record(self, path: str, sha256: str) -> None:
        """Write down what an object is; an empty digest: that it is no more."""
        known = self._store.get(OBJECT, "", path)
        before = known.spec.sha256 if known is not None else ""
        if before == sha256:
            return
        if before:
            log.warning("objects.changed", path=path, before=before, after=sha256)

        def change(draft: Draft) -> None:
            if sha256:
                draft.put(OBJECT, "", path, spec=ObjectRecord(sha256=sha256))
            elif draft.get(OBJECT, "", path) is not None:
                draft.delete(OBJECT, "", path)

        touches = [OBJECT.key("", path)]
        await self._store.transact(change, actor=ACTOR, action="objects.record", touches=touches)


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def differing(objects: Objects, records: Sequence[tuple[str, ObjectRecord]]) -> list[str]:
    """The first few recorded objects that a storage has not as they were last used, a sentence each."""
    told: list[str] = []
    for path, record in records:
        try:
            found = await objects.get(path)
        except FleetplaneError as error:
            told.append(f"object {path} cannot be compared: {error.message}")
        else:
            now = "" if found is None else digest(found.body)
            if found is None:
                told.append(f"object {path} is missing")
            elif now != record.sha256:
                told.append(f"object {path} has the SHA-256 {now}, and {record.sha256} was last used")
        if len(told) == SHOWN:
            break
    return told
