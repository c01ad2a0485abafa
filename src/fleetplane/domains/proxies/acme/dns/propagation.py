"""Waiting until a DNS record can be seen where the authority will look.

Only servers that are authoritative for the zone are asked: a resolver in between may answer
from a cache, or from a view of the zone that nobody outside has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from fleetplane.domains.proxies.acme.errors import IssuanceFailed
from fleetplane.kernel.clock import Clock

WAIT_SECONDS = 180.0
"""Secondary servers usually follow within a minute."""
POLL_SECONDS = 2.0
Server = tuple[str, int]


class Propagation:
    def __init__(
        self,
        clock: Clock,
        *,
        servers: Sequence[Server] = (),
        wait_seconds: float = WAIT_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        """`servers` are asked instead of looking for those of the zone."""
        self._clock = clock
        self._servers = tuple(servers)
        self._wait_seconds = wait_seconds
        self._poll_seconds = poll_seconds

    async def wait(self, name: str, values: Collection[str]) -> None:
        """Until every server shows every value."""
        from fleetplane.domains.proxies.acme.dns import queries as dns_queries

        servers = self._servers or await dns_queries.authoritative(name)
        deadline = self._clock.monotonic() + self._wait_seconds
        behind = list(servers)
        while True:
            shown = await asyncio.gather(*(dns_queries.texts(server, name) for server in behind))
            behind = [
                server
                for server, texts in zip(behind, shown, strict=True)
                if texts is None or not texts.issuperset(values)
            ]
            if not behind:
                return
            if self._clock.monotonic() >= deadline:
                late = ", ".join(address for address, _ in behind)
                raise IssuanceFailed(f"the record {name} did not appear at {late} in time")
            await self._clock.sleep(self._poll_seconds)
