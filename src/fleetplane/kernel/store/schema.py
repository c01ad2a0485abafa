"""The tables, as they are at the newest schema revision.

`migrations/` holds the way here from every older one; a test keeps the two in agreement.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, String, Table, Text

SCHEMA_REVISION = "0001"
"""The newest migration. A database that says so is opened without loading Alembic."""

METADATA = MetaData()

RESOURCES = Table(
    "resources",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("scope", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""The current version of every live resource."""

EVENTS = Table(
    "events",
    METADATA,
    Column("revision", BigInteger, primary_key=True),
    Column("ordinal", Integer, primary_key=True),
    Column("type", String(8), nullable=False),
    Column("kind", Text, nullable=False),
    Column("scope", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("events_by_kind", "kind", "revision", "ordinal"),
    sqlite_with_rowid=False,  # clustered by revision: appended at one end, trimmed at the other
)
"""The log: every change since the compaction horizon, in order."""

KINDS = Table(
    "kinds",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("revision", BigInteger, nullable=False),
)
"""The last change to each kind, which deletions and compaction would otherwise hide."""

CLAIMS = Table(
    "claims",
    METADATA,
    Column("kind", Text, primary_key=True),
    Column("scope", Text, primary_key=True),
    Column("field", Text, primary_key=True),
    Column("value", Text, primary_key=True),
    Column("owner", Text, nullable=False),
)

SECRETS = Table(
    "secrets",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("blob", LargeBinary, nullable=False),
)
"""Opaque blobs, encrypted by whoever puts them."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
    Column("entry", LargeBinary, nullable=False),
)

META = Table(
    "meta",
    METADATA,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    Column("compacted", BigInteger, nullable=False),
    Column("audit_seq", BigInteger, nullable=False),
    Column("audit_hash", LargeBinary, nullable=False),
)
"""One row: where the store and its audit chain stand."""
