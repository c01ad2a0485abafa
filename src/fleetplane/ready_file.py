"""The ready file: written once all listeners accept, with their addresses.

It is there only while that is true. One that a killed server left behind is taken away before
anything is opened, so that nobody reads the addresses of the dead.
"""

from __future__ import annotations

import json
import os
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
def published(place: str, addresses: Mapping[str, list[str]]) -> Iterator[None]:
    """Write the file, whole or not at all; on leaving, remove it unless it is another server's by now."""
    if not place:
        yield
        return
    path = Path(place)
    content = json.dumps({"version": __version__, "pid": os.getpid(), "listeners": addresses}) + "\n"
    staging = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        staging.write_text(content)
        staging.replace(path)
    except OSError as error:
        with suppress(OSError):
            staging.unlink(missing_ok=True)
        raise SettingsError(f"ready_file: cannot write {path}: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == content:
                path.unlink()
