"""Who has the seat, where several servers share a database: it is no longer the one who wrote last."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":  # a file has one server
        return
    op.execute("CREATE TABLE seats (term bigint PRIMARY KEY, server text NOT NULL, boot bigint NOT NULL)")
    op.execute(
        "INSERT INTO seats SELECT term, server, boot FROM groups"
        " WHERE number = (SELECT max(number) FROM groups) AND term > 0"
    )
