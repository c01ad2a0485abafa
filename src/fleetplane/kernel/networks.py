"""What counts as one address where strangers are counted. Pure."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

IPV6_PREFIX: Final = 64
"""What one household has: within it, anyone can have as many addresses as they like."""
IPV6_SITE_PREFIX: Final = 48
"""What one customer of a provider may have: 65,536 networks of households."""
IPV4_SITE_PREFIX: Final = 24
"""The smallest network of IPv4 that is routed on its own."""


@lru_cache(maxsize=16_384)
def network_of(address: str) -> str:
    """An IPv4 address itself, also one inside an IPv6 address; of any other IPv6 address its network."""
    if ":" not in address:
        return address  # IPv4, or a Unix socket
    try:
        parsed = ipaddress.IPv6Address(address)
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    if parsed.is_loopback:
        return str(parsed)
    if parsed.scope_id is not None:
        parsed = ipaddress.IPv6Address(parsed.packed)
    return str(ipaddress.IPv6Network((parsed, IPV6_PREFIX), strict=False))


@lru_cache(maxsize=16_384)
def wider_network_of(address: str) -> str:
    """The network that one customer of a provider may have as a whole; what is no address stays as it is."""
    try:
        parsed = ipaddress.ip_network(network_of(address), strict=False)
    except ValueError:
        return address
    prefix = IPV4_SITE_PREFIX if parsed.version == 4 else IPV6_SITE_PREFIX
    return str(parsed.supernet(new_prefix=min(prefix, parsed.prefixlen)))
