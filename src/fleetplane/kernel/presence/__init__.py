"""Where agents are: on which of several servers each has its session, and when it was last heard."""

from fleetplane.kernel.presence.heard import LastSeen
from fleetplane.kernel.presence.kinds import PRESENCE, PresenceSpec
from fleetplane.kernel.presence.whereabouts import ReplayedHello, Whereabouts

__all__ = ["PRESENCE", "LastSeen", "PresenceSpec", "ReplayedHello", "Whereabouts"]
