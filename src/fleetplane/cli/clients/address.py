"""Where the device API is: addresses as people write them, and the one to use when none is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fleetplane.kernel.errors import InvalidArgument

SYSTEM_SOCKET = Path("/var/run/device-api/device.sock")
LOCAL_SOCKET = Path("fleetplane-data/device.sock")
TCP_ADDRESS = "127.0.0.1:50051"

SOCKET_PATH_LIMIT_BYTES = 107
"""What fits into the kernel's socket address, less its closing zero byte."""


def default_address(exists: Callable[[Path], bool] = Path.exists) -> str:
    """The system's socket, else the one of a server started in this folder, else the local port.

    Which of them is there changes as servers come and go: ask again for every connection.
    """
    for socket in (SYSTEM_SOCKET, LOCAL_SOCKET):
        if exists(socket):
            return f"unix://{socket.absolute()}"
    return TCP_ADDRESS


def parse_address(text: str) -> str:
    """`unix:///path`, a bare path, `host:port`, or `http://host:port` as a ready file spells it."""
    if text.startswith(("unix:", "/", "./")):
        path = Path(re.sub("^unix:(//)?", "", text))
        if not path.name:
            raise InvalidArgument(f"{text!r} names no socket file", field="address")
        place = str(path.absolute())
        if len(place.encode()) > SOCKET_PATH_LIMIT_BYTES:
            raise InvalidArgument(
                f"the socket path {place} is longer than {SOCKET_PATH_LIMIT_BYTES} bytes, the system's limit",
                field="address",
            )
        return f"unix://{place}"
    rest = text.removeprefix("http://").rstrip("/")
    host, _, port = rest.rpartition(":")
    if not host or "/" in rest or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgument(
            f"{text!r} is no address", field="address", hint="write unix:///path/to/device.sock or host:port"
        )
    return rest
