"""Ports that stay free until a test has given them to somebody, whatever else the machine does meanwhile."""

from __future__ import annotations

import random
import socket

LOWEST, HIGHEST = 11_000, 32_000
"""Below those that the kernel hands out itself: no connection and no listener at port 0 ever gets one."""
_KEPT: list[socket.socket] = []
"""While this process lives, no other process of these tests is given the same."""


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port of the loopback interface that nobody listens at."""
    source = random.SystemRandom()
    for _ in range(1000):
        port = source.randint(LOWEST, HIGHEST)
        if _is_free(port, kind) and _keep(port):
            return port
    raise AssertionError("no port is free")


def _is_free(port: int, kind: socket.SocketKind) -> bool:
    with socket.socket(type=kind) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _keep(port: int) -> bool:
    """Take a name that only one process can have; the kernel gives it back when that ends."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0fleetplane-tests-port-{port}")
    except OSError:
        mark.close()
        return False
    _KEPT.append(mark)
    return True
