"""What is stored about an agent's session: one resource for each agent of a channel.

A presence outlives its session, marked as left: the time of its hello must stay known for as long as that
hello could be shown again.
"""

from __future__ import annotations

import msgspec

from fleetplane.kernel.resources import Kind, Nothing


class PresenceSpec(msgspec.Struct, frozen=True, kw_only=True):
    server: str
    """Which has the session, or had it; empty once nobody has anything to do about its end."""
    boot: int
    """The process of that server; 0 if it forgot the session."""
    session: int
    """The revision that the session began with: a later one has a higher number, on whichever server."""
    hello_at_ns: int = 0
    """The time of the newest hello that was accepted, by the agent's clock; 0 if hellos say none."""
    digest: bytes = b""
    """Of that hello."""
    left_at_ns: int = 0
    """When the session ended; 0 while it lasts."""

    @property
    def is_open(self) -> bool:
        return self.left_at_ns == 0


PRESENCE: Kind[PresenceSpec, Nothing] = Kind("presence", PresenceSpec, Nothing)
"""Its scope is the channel, its name the agent."""
