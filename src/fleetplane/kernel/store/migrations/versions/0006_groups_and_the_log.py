"""One row for every group, and a log of every change.

What was logged so far keeps its order: each transaction becomes a group of its own. Of those the audit
entries are not known any more, only of the last.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

MOVED = ("revision", "compacted", "audit_seq", "audit_hash")
"""From the one row that every commit updated."""


def upgrade() -> None:
    op.create_table(
        "groups",
        sa.Column(
            "number",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("compacted", sa.BigInteger, nullable=False),
        sa.Column("audit_seq", sa.BigInteger, nullable=False),
        sa.Column("audit_hash", sa.LargeBinary, nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("server", sa.Text, nullable=False),
        sa.Column("boot", sa.BigInteger, nullable=False),
        sa.Column("group_id", sa.LargeBinary, nullable=False),
        sa.Column("at_ns", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "log",
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("type", sa.String(8), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("log_by_kind", "log", ["kind", "revision"])
    op.add_column("secrets", sa.Column("version", sa.BigInteger, nullable=False, server_default="0"))
    _move()
    op.drop_table("events")
    with op.batch_alter_table("meta") as meta:
        for column in MOVED:
            meta.drop_column(column)


def _move() -> None:
    connection = op.get_bind()
    connection.execute(
        sa.text(
            "INSERT INTO log (number, position, revision, ordinal, type, kind, scope, body)"
            " SELECT dense_rank() OVER (ORDER BY revision - ordinal), ordinal, revision, ordinal, type, kind,"
            " scope, body FROM events"
        )
    )
    # The last transaction may have logged nothing (a claim, a secret): the head comes after all of them.
    connection.execute(
        sa.text(
            "INSERT INTO groups (number, revision, compacted, audit_seq, audit_hash, term, server, boot,"
            " group_id, at_ns) SELECT number, max(revision), 0, 0, :none, 0, '', 0, :none, 0"
            " FROM log GROUP BY number"
        ),
        {"none": b""},
    )
    connection.execute(
        sa.text(
            "INSERT INTO groups (number, revision, compacted, audit_seq, audit_hash, term, server, boot,"
            " group_id, at_ns) SELECT (SELECT coalesce(max(number), 0) + 1 FROM log), revision, compacted,"
            " audit_seq, audit_hash, 0, '', 0, :none, 0 FROM meta"
        ),
        {"none": b""},
    )
