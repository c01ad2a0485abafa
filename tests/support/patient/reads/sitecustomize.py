"""Let servers keep their seat, and answer reads, although the machine stands still for seconds."""

from __future__ import annotations

from fleetplane.kernel.store.servers import read_index, seat

seat.GIVE_UP_SECONDS, seat.LIFE_SECONDS = 18.0, 20.0
read_index.FRESH_SECONDS = 60.0

from fleetplane import standby_reads  # noqa: E402 - it takes the number above when it is loaded

standby_reads.STALE_SECONDS = 60.0
