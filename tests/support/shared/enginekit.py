"""Groups for tests of engines, made without a store."""

from __future__ import annotations

import secrets
from dataclasses import replace

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.store.engine import DatabaseMark, LogRow, ResourceRow, WriteGroup

EMPTY = DatabaseMark(number=0, revision=0, compacted=0, audit_seq=0, audit_hash=audit.GENESIS)


def group(before: DatabaseMark, *names: str, body: bytes = b"body") -> WriteGroup:
    """One transaction that puts these names."""
    first, seq = before.revision + 1, before.audit_seq + 1
    revision = before.revision + len(names)
    row = audit.append(before.audit_hash, audit.ChainEntry(seq, revision, 0, "t", "put", ()))
    return WriteGroup(
        id=secrets.token_bytes(16),
        before=before,
        after=replace(
            before, number=before.number + 1, revision=revision, audit_seq=seq, audit_hash=row.hash
        ),
        puts=[ResourceRow("thing", "s", name, first + n, body) for n, name in enumerate(names)],
        log=[LogRow(first + n, n, "ADDED", "thing", "s", body) for n, _ in enumerate(names)],
        kinds=[("thing", revision)],
        audit=[row],
    )
