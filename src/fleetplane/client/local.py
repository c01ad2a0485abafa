"""The server on this machine: finding its owner's socket without being told where its data is.

The kernel lists every socket that somebody listens at. Only those are taken that belong to whoever asks: a
socket of another user would be that user's word for the fleet.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleetplane.kernel.errors import Conflict, Unavailable

SOCKET = "admin.sock"
"""In a server's data directory; only its owner can open it."""
DATA_DIR = Path("fleetplane-data")
"""Where `fleetplane server` keeps its data unless told otherwise."""
VARIABLE = "FLEETPLANE_DATA_DIR"
LISTENED_AT = Path("/proc/net/unix")
ACCEPTS = 0x10000
"""The kernel's flag (`__SO_ACCEPTCON`) of a socket that somebody listens at."""


def data_directory(given: Path | None = None) -> Path:
    """The given data directory, else the one of the server that is found."""
    return found() if given is None else given


def found() -> Path:
    """The folder's own server, else the only one of this user that runs; raises when several do."""
    if (DATA_DIR / SOCKET).exists():
        return DATA_DIR
    running = sorted({path.parent for path in owned(listening())})
    if len(running) > 1:
        raise Conflict(
            f"{len(running)} servers of yours run on this machine: {', '.join(map(str, running))}",
            hint="--data-dir names the one that is meant",
        )
    return running[0] if running else DATA_DIR


def socket_of(data_dir: Path) -> Path:
    """The owner's socket of the server with that data directory; raises when nobody listens there."""
    path = (data_dir / SOCKET).absolute()
    if not path.exists():
        raise Unavailable(
            f"no server listens at {path}",
            hint="--data-dir names the data directory of one that runs; `fleetplane login URL` is for others",
        )
    return path


def listening(table: Path = LISTENED_AT) -> Iterator[Path]:
    """Owners' sockets that somebody listens at, as the kernel lists them."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:  # no such table here: whoever asks names the data directory
        return
    for line in lines[1:]:
        # Num RefCount Protocol Flags Type St Inode Path; the path may have spaces.
        fields = line.split(None, 7)
        if len(fields) == 8 and int(fields[3], 16) & ACCEPTS:
            path = Path(fields[7])
            if path.is_absolute() and path.name == SOCKET:
                yield path


def owned(paths: Iterable[Path]) -> Iterator[Path]:
    """Those that are sockets of the user who asks."""
    for path in paths:
        try:
            told = path.lstat()
        except OSError:  # in a folder of somebody else, or gone
            continue
        if stat.S_ISSOCK(told.st_mode) and told.st_uid == os.geteuid():
            yield path
