"""A column more in what every server reads and writes all the time; those that do not know it go on."""

from __future__ import annotations

from alembic import op

revision = "next"
down_revision = "0011"
branch_labels = None
depends_on = None
oldest_level = 1


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in ("resources", "log", "groups", "servers", "seats", "claims"):
        op.execute(f"ALTER TABLE {table} ADD COLUMN of_the_next text NOT NULL DEFAULT ''")
