"""From which address a call comes, when proxies stand between. Pure.

Only those proxies are believed that the operators named: what others write into `x-forwarded-for`
is theirs to invent. Read from the right, where the nearest proxy wrote, the first address that is
no proxy of ours is the caller's. Addresses of version 6 count by their network of 64 bits, which
is what one customer is given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from fleetplane.kernel.errors import SettingsError

FORWARDED_FIELD = "x-forwarded-for"
HOPS_LIMIT = 16
"""Addresses looked at in one chain; three proxies in a row are many."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks as they stand in the settings."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError as error:
            raise SettingsError(f"trusted_proxies: {text!r} is neither an address nor a network") from error
    return tuple(found)


def caller_address(peer: str, forwarded: Sequence[str], trusted: Sequence[Network]) -> str:
    """What limits per address go by; `peer` itself where it is no address, as on a local socket."""
    address = _address(peer)
    if address is None:
        return peer
    hops = [hop.strip() for value in forwarded for hop in value.split(",") if hop.strip()]
    for hop in reversed(hops[-HOPS_LIMIT:]):
        if not any(address in network for network in trusted):
            break
        nearer = _address(hop)
        if nearer is None:
            break
        address = nearer
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _address(text: str) -> Address | None:
    """With or without a port, in brackets or not."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else found
