"""Where the lineage of a database began to count."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("meta", sa.Column("first_revision", sa.BigInteger, nullable=False, server_default="0"))
