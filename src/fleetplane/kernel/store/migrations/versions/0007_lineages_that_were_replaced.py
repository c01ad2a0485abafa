"""Which lineages the owner gave up for this one: servers that have seen those accept it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("meta", sa.Column("replaced", sa.Text, nullable=False, server_default=""))
