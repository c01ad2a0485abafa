"""Where servers of a configuration listen, and whether hosts here can. Pure.

Hosts and streams here listen wherever the node serves, to whoever comes. A server that listens on one
address, or on a socket, listens to a few: it is not imported as one for everybody.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

EVERYWHERE: Final = ("", "*", "0.0.0.0", "[::]")  # noqa: S104  # what NGINX calls every address
_LISTEN: Final = re.compile(
    r"(?:(?P<address>\[[^\]]*\]|[^:\[\]]*):)?(?P<port>[0-9]{1,5})|(?P<alone>\[[^\]]*\]|[^:\[\]]+)"
)
_OPTIONS: Final = frozenset({"default_server", "ssl", "http2", "reuseport", "deferred", "bind"})
_SIZES: Final = ("backlog=", "rcvbuf=", "sndbuf=", "fastopen=", "ipv6only=", "so_keepalive=")


def listen_fault(arguments: Sequence[str], addresses: Collection[str]) -> str:
    """Why a host cannot listen like this; empty if it can. `addresses` are those that the node serves on."""
    found = _LISTEN.fullmatch(arguments[0])
    address = None if found is None else found["address"] or found["alone"] or ""
    if address is None or not (address in EVERYWHERE or address.strip("[]") in addresses):
        return "hosts listen on every address that the node serves; see --address"
    unknown = [one for one in arguments[1:] if one not in _OPTIONS and not one.startswith(_SIZES)]
    return f"{unknown[0]} has no typed form here" if unknown else ""


def listen_port(listen: str) -> int:
    found = _LISTEN.fullmatch(listen)
    return int(found["port"] or 80) if found else 80
