"""Objects whose content is recorded in the audited store, so that one that was exchanged is found.

Operators put documents, user data and files into the storage beside the server. So the digest of each
object is recorded before its content is used: another content has an entry in the audit log, and what was
changed since it was last used is named by `audit verify`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import msgspec
import structlog

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.objects.port import Objects, StoredObject
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

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
