"""What a server says of itself for others to see, in its row of the database."""

from __future__ import annotations

from dataclasses import dataclass

from fleetplane.kernel.store.bells.bus import NO_BUS, BusState


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReport:
    agents: int = 0
    """Streams of agents that it holds."""
    controllers: int = 0
    """Leases of controllers that it holds."""
    bus: BusState = NO_BUS
