"""What a server says of itself, where several share a database: its agents, its controllers, its bus."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":  # a file has one server
        return
    op.execute(
        "ALTER TABLE servers ADD COLUMN agents bigint NOT NULL DEFAULT 0,"
        " ADD COLUMN controllers bigint NOT NULL DEFAULT 0,"
        " ADD COLUMN bus text NOT NULL DEFAULT 'none',"
        " ADD COLUMN bus_connected boolean NOT NULL DEFAULT false"
    )
