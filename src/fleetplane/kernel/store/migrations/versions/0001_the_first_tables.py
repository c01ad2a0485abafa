"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from fleetplane.kernel.audit.chain import GENESIS

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "resources",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("revision", sa.BigInteger, primary_key=True),
        sa.Column("ordinal", sa.Integer, primary_key=True),
        sa.Column("type", sa.String(8), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("events_by_kind", "events", ["kind", "revision", "ordinal"])
    op.create_table(
        "kinds",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "claims",
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("scope", sa.Text, primary_key=True),
        sa.Column("field", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("blob", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("entry", sa.LargeBinary, nullable=False),
    )
    meta = op.create_table(
        "meta",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("compacted", sa.BigInteger, nullable=False),
        sa.Column("audit_seq", sa.BigInteger, nullable=False),
        sa.Column("audit_hash", sa.LargeBinary, nullable=False),
    )
    op.bulk_insert(meta, [{"id": 1, "revision": 0, "compacted": 0, "audit_seq": 0, "audit_hash": GENESIS}])
