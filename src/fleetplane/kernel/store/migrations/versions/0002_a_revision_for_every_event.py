"""A revision for every event.

Until now all events of a transaction had the same one, so that nobody could tell how many of them
a watcher had seen. They cannot be told apart afterwards: the log begins anew behind one more
revision, which stands in the audit chain, and every older cursor is told to list again.
"""

from __future__ import annotations

import time

import sqlalchemy as sa
from alembic import op

from fleetplane.kernel.audit import chain as audit

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    found = connection.execute(sa.text("SELECT revision, audit_seq, audit_hash FROM meta")).one()
    if not found.audit_seq:
        return
    entry = audit.ChainEntry(
        seq=found.audit_seq + 1,
        revision=found.revision + 1,
        at_ns=time.time_ns(),
        actor="system",
        action="store.migrate",
        changes=(),
    )
    row = audit.append(found.audit_hash, entry)
    connection.execute(sa.text("DELETE FROM events"))
    connection.execute(
        sa.text("INSERT INTO audit (seq, hash, entry) VALUES (:seq, :hash, :entry)"),
        {"seq": row.seq, "hash": row.hash, "entry": row.entry},
    )
    connection.execute(
        sa.text("UPDATE meta SET revision = :to, compacted = :to, audit_seq = :seq, audit_hash = :hash"),
        {"to": entry.revision, "seq": row.seq, "hash": row.hash},
    )
