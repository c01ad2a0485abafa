"""When each agent was last heard, where several servers share a database: by whichever of them."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name != "postgresql":  # a file has one server, which remembers whom it heard
        return
    op.execute(
        "CREATE TABLE heard (channel text NOT NULL, agent text NOT NULL, at timestamptz NOT NULL,"
        " PRIMARY KEY (channel, agent)) WITH (fillfactor = 50)"
    )
