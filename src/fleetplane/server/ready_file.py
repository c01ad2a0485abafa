"""The ready file: written once a server serves, with its role and the addresses of its listeners.

It is there only while that is true. A supervisor that gave the process a socket (`Type=notify` of systemd)
is told the same. A file that a killed server left behind is taken away before the next
one leads, so that nobody reads the addresses of the dead.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fleetplane import __version__
from fleetplane.kernel.errors import SettingsError


def withdraw(place: str) -> None:
    """Remove what an earlier server left."""
    if place:
        try:
            Path(place).unlink(missing_ok=True)
        except OSError as error:
            raise SettingsError(f"ready_file: cannot replace {place}: {error.strerror}") from error


@contextmanager
def published(
    place: str, addresses: Mapping[str, list[str]], *, role: str, supervisor: str
) -> Iterator[None]:
    """Write the file, whole or not at all; on leaving, remove it unless it is another server's by now."""
    if not place:
        tell_supervisor(supervisor, f"READY=1\nSTATUS={role}")
        yield
        return
    path = Path(place)
    said = {"version": __version__, "pid": os.getpid(), "role": role, "listeners": addresses}
    content = json.dumps(said) + "\n"
    staging = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        staging.write_text(content)
        staging.replace(path)
    except OSError as error:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
        raise SettingsError(f"ready_file: cannot write {path}: {error.strerror}") from error
    tell_supervisor(supervisor, f"READY=1\nSTATUS={role}")
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == content:
                path.unlink()


def tell_supervisor(place: str, state: str) -> None:
    """Send a new state to the socket of systemd, or of what speaks as it does; nobody is waited for."""
    if place:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect("\0" + place[1:] if place.startswith("@") else place)
            sender.send(state.encode())
