"""Which processes there are, by a mark in their command lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def with_mark(mark: str) -> Iterator[int]:
    """Processes whose command line has the mark in it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line:
                yield int(entry.name)


def gone(mark: str) -> bool:
    return not list(with_mark(mark))
