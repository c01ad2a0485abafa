"""Where a database file stands, read by whoever looks at the file without opening the store."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple


class StoreStanding(NamedTuple):
    lineage: str
    revision: int
    audit_seq: int
    audit_hash: bytes
    audit_cut: str
    """The signed checkpoint of the last audit entry that was archived."""


_NOW = (
    "SELECT lineage, revision, audit_seq, audit_hash, audit_cut FROM meta, groups"
    " WHERE number = (SELECT max(number) FROM groups)"
)
_BEFORE = "SELECT lineage, revision, audit_seq, audit_hash, audit_cut FROM meta"
"""Of a database that was not opened since every group has a row."""


def standing(database: sqlite3.Connection) -> StoreStanding | None:
    """None if the database does not say: a row is missing that there always is."""
    tables = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'groups'").fetchone()
    rows = database.execute(_NOW if tables[0] else _BEFORE).fetchall()
    return StoreStanding(*rows[0]) if len(rows) == 1 else None
