"""Questions to DNS servers. Loaded when the first one is asked."""

from __future__ import annotations

import dns.asyncquery
import dns.asyncresolver
import dns.exception
import dns.message
import dns.name
import dns.rdatatype
import dns.resolver

from fleetplane.domains.proxies.acme.orders import IssuanceFailed

QUERY_SECONDS = 5.0
SERVERS_LIMIT = 8
DNS_PORT = 53
Server = tuple[str, int]
_FAILURES = (dns.exception.DNSException, OSError)


async def texts(server: Server, name: str) -> set[str] | None:
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
