"""What Alembic runs: always on a connection that the caller has opened, never by a URL of its own."""

from alembic import context

from fleetplane.kernel.store.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
