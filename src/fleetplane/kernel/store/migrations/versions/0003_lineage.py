"""Which lineage a database is of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from fleetplane.kernel.store.lineage import new_id

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("meta", sa.Column("lineage", sa.Text, nullable=False, server_default=""))
    op.get_bind().execute(sa.text("UPDATE meta SET lineage = :lineage"), {"lineage": new_id()})
