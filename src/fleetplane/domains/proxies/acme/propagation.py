"""Waiting until a DNS record can be seen where the authority will look.

Only servers that are authoritative for the zone are asked: a resolver in between may answer
from a cache, or from a view of the zone that nobody outside has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

import dns.asyncquery
import dns.asyncresolver
import dns.exception
import dns.message
import dns.name
import dns.rdatatype
import dns.resolver

from fleetplane.domains.proxies.acme.errors import IssuanceFailed
from fleetplane.kernel.clock import Clock

WAIT_SECONDS = 180.0
"""Secondary servers usually follow within a minute."""
POLL_SECONDS = 2.0
QUERY_SECONDS = 5.0
SERVERS_LIMIT = 8
DNS_PORT = 53
Server = tuple[str, int]
_FAILURES = (dns.exception.DNSException, OSError)


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
        servers = self._servers or await authoritative(name)
        deadline = self._clock.monotonic() + self._wait_seconds
        behind = list(servers)
        while True:
            shown = await asyncio.gather(*(_texts(server, name) for server in behind))
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


async def _texts(server: Server, name: str) -> set[str] | None:
    """The TXT records that a server has under a name; None if it does not say."""
    address, port = server
    query = dns.message.make_query(name, dns.rdatatype.TXT)
    try:
        answer, _ = await dns.asyncquery.udp_with_fallback(query, address, timeout=QUERY_SECONDS, port=port)
    except _FAILURES:
        return None
    return {
        b"".join(record.strings).decode("ascii", "replace")
        for rrset in answer.answer
        if rrset.rdtype == dns.rdatatype.TXT
        for record in rrset
    }


async def authoritative(name: str) -> list[Server]:
    """The addresses of the servers of the zone that a name lies in."""
    zone = dns.name.from_text(name)
    try:
        while zone != dns.name.root:
            try:
                found = await dns.asyncresolver.resolve(zone, "NS", lifetime=QUERY_SECONDS)
            except (dns.resolver.NoAnswer, dns.resolver.NXDOMAIN):
                zone = zone.parent()
                continue
            addresses: list[Server] = []
            for record in found:
                addresses.extend(await _addresses(record.target))
            if addresses:
                return addresses[:SERVERS_LIMIT]
            break
    except _FAILURES as error:
        raise IssuanceFailed(f"the DNS servers for {name} cannot be found: {error}") from error
    raise IssuanceFailed(f"no DNS server is known for {name}")


async def _addresses(host: dns.name.Name) -> list[Server]:
    try:
        found = await dns.asyncresolver.resolve(host, "A", lifetime=QUERY_SECONDS)
    except (dns.resolver.NoAnswer, dns.resolver.NXDOMAIN):
        return []
    return [(record.address, DNS_PORT) for record in found]
