"""Which address of this machine faces a server."""

from __future__ import annotations

import socket


def address_towards(server: str, family: socket.AddressFamily = socket.AddressFamily.AF_UNSPEC) -> str:
    """The address this machine would speak to `server` (host:port) from; empty if there is none.

    Asks the routing table by way of a datagram socket that sends nothing. Blocking on name look-up.
    """
    host, _, port = server.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), family, socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except (OSError, ValueError, IndexError):
        return ""
