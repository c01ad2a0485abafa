"""The tables, as they are at the newest schema revision.

`migrations/` holds the way here from every older one; a test keeps the two in agreement.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, String, Table, Text

SCHEMA_REVISION = "0011"
"""The newest migration. A database that says so is opened without loading Alembic."""

METADATA = MetaData()
NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""There, an integer is what rows are clustered by."""

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

GROUPS = Table(
    "groups",
    METADATA,
    Column("number", NUMBER, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    Column("compacted", BigInteger, nullable=False),
    Column("audit_seq", BigInteger, nullable=False),
    Column("audit_hash", LargeBinary, nullable=False),
    Column("term", BigInteger, nullable=False),
    Column("server", Text, nullable=False),
    Column("boot", BigInteger, nullable=False),
    Column("group_id", LargeBinary, nullable=False),
    Column("at_ns", BigInteger, nullable=False),
)
"""One appended row per commit, numbered without gaps: where the store stood after it, and who wrote it.

The last is the state of the store. No row is ever updated."""

LOG = Table(
    "log",
    METADATA,
    Column("number", BigInteger, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("revision", BigInteger, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("type", String(8), nullable=False),
    Column("kind", Text, nullable=False),
    Column("scope", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("log_by_kind", "kind", "revision"),
    sqlite_with_rowid=False,  # clustered by number: appended at one end, trimmed at the other
)
"""Every change since the compaction horizon, in order, by group; see `log.py` for what is in it.

The ordinal says how far into its transaction a change of a resource is. Other changes have no kind."""

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
    Column("version", BigInteger, nullable=False, server_default="0"),
)
"""Opaque blobs, encrypted by their writers. The version is the audit entry that put it."""

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
    Column("lineage", Text, nullable=False, server_default=""),
    Column("audit_cut", Text, nullable=False, server_default=""),
    Column("first_revision", BigInteger, nullable=False, server_default="0"),
    Column("replaced", Text, nullable=False, server_default=""),
)
"""One row: which lineage this is, and which ones its owner gave up for it, separated by spaces.

The cut is the signed checkpoint of the last audit entry that was archived."""
