"""Let servers keep their seat, answer and wait for the database although the machine stands still."""

from __future__ import annotations

from fleetplane.kernel.store.servers import leader_lease

leader_lease.GIVE_UP_SECONDS, leader_lease.LIFE_SECONDS = 18.0, 20.0
leader_lease.FRESH_SECONDS = 60.0

# These take the numbers above when they are loaded.
from fleetplane.kernel.presence import last_seen, registry  # noqa: E402
from fleetplane.kernel.store.engines import postgres, postgres_line  # noqa: E402
from fleetplane.kernel.telemetry.postgres import link  # noqa: E402
from fleetplane.server import serving  # noqa: E402

serving.STALE_SECONDS = 60.0
last_seen.ASK_SECONDS = registry.ORPHANS_SECONDS = 60.0
postgres_line.CONNECT_SECONDS = 60.0
for one in (postgres.WRITER, postgres.READER, link.WRITER, link.READER):
    one["idle_in_transaction_session_timeout"] = "60000"
for one in (postgres.WRITER, link.WRITER):
    one["lock_timeout"] = "60000"
for one in (postgres.READER, link.READER):
    one["statement_timeout"] = "60000"
link.PATIENCE.update(write=60.0, question=60.0)
