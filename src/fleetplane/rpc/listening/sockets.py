"""Listening sockets, opened here and handed to the HTTP server, and how many connections they may have.

Decides what happens to the file of a Unix socket, its permissions from the first moment, and how a
vanished peer is noticed. Knows no HTTP.

Accepting one connection too many fails for the whole listener, and leaves the database no file descriptor
for its log. So connections are limited to the descriptors that are sure to be there.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetplane.kernel.errors import SettingsError

CONNECTIONS: Final = 10_000
"""Per listener that asks for no number; beyond it, connections wait in the kernel's backlog."""
RESERVED: Final = 128
"""For what is no connection: a server at rest has 40 open, the rest is for files and child processes."""
FEWEST: Final = 16
"""Connections per listener, whatever the limit: a server without any is of no use."""


def connections_of(wanted: Sequence[int]) -> list[int]:
    """What each listener gets, having raised the process's soft limit as far as needed.

    One that wants 0 shares what the others leave.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = sum(number or CONNECTIONS for number in wanted) + RESERVED
    if soft < needed:
        soft = min(needed, hard)
        with suppress(OSError, ValueError):  # a sandbox may forbid even what is permitted
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_within(soft, wanted)


def connections_within(descriptors: int, wanted: Sequence[int]) -> list[int]:
    sharing = sum(number == 0 for number in wanted)
    left = descriptors - RESERVED - sum(wanted)
    if any(wanted) and left < FEWEST * sharing:
        raise SettingsError(
            f"listeners want {sum(wanted)} connections, and this process may have {descriptors} files open",
            hint="raise that limit (ulimit -Hn, LimitNOFILE=), or ask for fewer",
        )
    share = max(FEWEST, min(CONNECTIONS, left // sharing)) if sharing else 0
    return [number or share for number in wanted]


BACKLOG: Final = 1024
"""Connections waiting to be accepted; a fleet that reconnects at once is a few hundred."""
DEAD_PEER_SECONDS: Final = 120
"""Unacknowledged bytes, or a reader that stands still, for this long end a TCP connection."""
KEEPALIVE_IDLE_SECONDS: Final = 60
KEEPALIVE_INTERVAL_SECONDS: Final = 20
"""After a quiet minute the kernel asks every 20 s whether the peer still exists."""
KEEPALIVE_PROBES: Final = 3
PATH_LIMIT_BYTES: Final = 107
"""What fits into the kernel's socket address, less its closing zero byte."""
PORT_LIMIT: Final = 65_535
"""The system would take a larger number for its last sixteen bits."""
_PROBE_SECONDS: Final = 1.0


@dataclass(slots=True)
class BoundSocket:
    socket: socket.socket
    path: Path | None = None
    """The socket file, when it is a Unix socket."""
    _identity: tuple[int, int] | None = None

    def address(self, scheme: str) -> str:
        """As the ready file writes it: `http://127.0.0.1:50051`, `unix:///run/device.sock`."""
        if self.path is not None:
            return f"unix://{self.path}"
        host, port = self.socket.getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def port(self) -> int | None:
        """None for a Unix socket."""
        return None if self.path is not None else int(self.socket.getsockname()[1])

    def remove_file(self) -> None:
        """Take the socket file away, unless someone has put another in its place."""
        if self.path is None:
            return
        try:
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self.path.unlink()
        except OSError:
            pass

    def close(self) -> None:
        self.remove_file()
        self.socket.close()


def open_socket(address: str, *, unix_mode: int) -> BoundSocket:
    """Bind and listen on `host:port`, `[v6]:port` or `unix:///path`."""
    if address.startswith("unix:"):
        return _open_unix(Path(address.removeprefix("unix:").removeprefix("//")), unix_mode)
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host or int(port) > PORT_LIMIT:
        raise SettingsError(f"{address!r} is no address: use HOST:PORT, [IPV6]:PORT or unix:///PATH")
    return _open_tcp(host.removeprefix("[").removesuffix("]"), int(port), address)


def end_connections(ports: Collection[int]) -> int:
    """Cut off every TCP connection of this process that was accepted at one of the ports; how many.

    The HTTP server owns them and offers no way to end one whose peer has stopped reading.
    """
    ended = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] in ports:
                    found.getpeername()  # one that listens has none
                    found.shutdown(socket.SHUT_RDWR)
                    ended += 1
        except OSError:  # gone meanwhile, or not connected
            continue
    return ended


def _open_tcp(host: str, port: int, address: str) -> BoundSocket:
    try:
        family, _, _, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise SettingsError(f"cannot listen on {address}: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _notice_dead_peers(listening)
        listening.bind(target)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise SettingsError(f"cannot listen on {address}: {error.strerror}") from error
    return BoundSocket(listening)


def _notice_dead_peers(listening: socket.socket) -> None:
    """Quiet streams may stay quiet for days, so the kernel, not a timeout, finds the dead ones.

    Accepted connections inherit these settings from the listening socket.
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", DEAD_PEER_SECONDS * 1000),
    ):
        if hasattr(socket, option):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _open_unix(path: Path, mode: int) -> BoundSocket:
    path = path.absolute()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if len(os.fsencode(path)) > PATH_LIMIT_BYTES:
            raise SettingsError(
                f"the socket path {path} is longer than {PATH_LIMIT_BYTES} bytes, the system's limit",
                hint="choose a shorter path",
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_way(path)
        # The file must never be more open than asked, not even for the moment before a chmod.
        previous = os.umask(0o777 & ~mode)
        try:
            listening.bind(str(path))
        finally:
            os.umask(previous)
        found = path.lstat()
        if stat.S_IMODE(found.st_mode) != mode:
            path.chmod(mode)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise SettingsError(f"cannot listen on unix://{path}: {error.strerror or error}") from error
    except SettingsError:
        listening.close()
        raise
    return BoundSocket(listening, path, (found.st_dev, found.st_ino))


def _make_way(path: Path) -> None:
    """Remove the socket file of a server that is gone; refuse to push aside one that is not."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise SettingsError(f"{path} exists and is not a socket", hint="remove it or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise SettingsError(f"cannot tell whether {path} is in use: {error.strerror or error}") from error
    raise SettingsError(f"another server is listening on {path}", hint="stop it or choose another path")
