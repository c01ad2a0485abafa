"""Let servers keep their seat, answer and wait for the database although the machine stands still."""

from __future__ import annotations

from fleetplane.kernel.store.servers import read_index, seat

seat.GIVE_UP_SECONDS, seat.LIFE_SECONDS = 18.0, 20.0
read_index.FRESH_SECONDS = 60.0

# These take the numbers above when they are loaded.
from fleetplane.kernel.presence import asking, whereabouts  # noqa: E402
from fleetplane.kernel.store.engines import postgres, postgres_line  # noqa: E402
from fleetplane.kernel.telemetry.postgres import link  # noqa: E402
from fleetplane.server import serving  # noqa: E402

serving.STALE_SECONDS = 60.0
asking.ASK_SECONDS = whereabouts.ORPHANS_SECONDS = 60.0
postgres_line.CONNECT_SECONDS = 60.0
for one in (postgres.WRITER, postgres.READER, link.WRITER, link.READER):
    one["idle_in_transaction_session_timeout"] = "60000"
for one in (postgres.WRITER, link.WRITER):
    one["lock_timeout"] = "60000"
for one in (postgres.READER, link.READER):
    one["statement_timeout"] = "60000"
link.PATIENCE.update(write=60.0, question=60.0)
