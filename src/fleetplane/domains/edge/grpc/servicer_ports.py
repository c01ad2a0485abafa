"""What the identity side of the edge domain asks of its neighbours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from fleetplane.rpc import CallContext


class EdgeStreamsPort(Protocol):
    async def connect(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """One stream of one daemon, from its hello to its end."""
