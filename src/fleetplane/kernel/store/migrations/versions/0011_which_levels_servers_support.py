"""Which levels of the store each server supports, and the oldest program that can use the tables.

From here on a migration says which programs can use what it leaves behind: `oldest_level`, the highest level
that they must support at least (see `servers/level.py`). One that only adds says 1; servers of older releases
work on while it is applied, and start again after it.
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":  # a file has one server
        return
    op.execute(
        "ALTER TABLE servers ADD COLUMN lowest_level integer NOT NULL DEFAULT 1,"
        " ADD COLUMN highest_level integer NOT NULL DEFAULT 1"
    )
    op.execute("CREATE TABLE usable (oldest_level integer NOT NULL)")
    op.execute("INSERT INTO usable VALUES (1)")
