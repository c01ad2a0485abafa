"""Where the audit chain was cut, because what came before is archived."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("meta", sa.Column("audit_cut", sa.Text, nullable=False, server_default=""))
