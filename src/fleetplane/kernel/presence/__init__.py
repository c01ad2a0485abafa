"""Where agents are: on which of several servers each has its session, and when it was last heard."""

from fleetplane.kernel.presence.departures import PRESENCE, PresenceSpec
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.presence.registry import PresenceRegistry, ReplayedHello

__all__ = ["PRESENCE", "LastSeen", "PresenceRegistry", "PresenceSpec", "ReplayedHello"]
