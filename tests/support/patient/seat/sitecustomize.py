"""Let servers keep their seat although the machine stands still for seconds: see `waiting_server.patient`."""

from __future__ import annotations

from fleetplane.kernel.store.servers import leader_lease

leader_lease.GIVE_UP_SECONDS, leader_lease.LIFE_SECONDS = 18.0, 20.0
