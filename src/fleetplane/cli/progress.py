"""A sign of life on stderr, in a terminal, for what takes more than a second and prints nothing meanwhile."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

AFTER_SECONDS = 1.0
EVERY_SECONDS = 0.5
WIDTH = 78
"""Characters of the line, which is drawn over: one that wraps could not be taken back."""
_is_drawing: ContextVar[bool] = ContextVar("is_drawing", default=False)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """While something else draws on the terminal, nothing is drawn over it."""
    before = _is_drawing.set(True)
    try:
        yield
    finally:
        _is_drawing.reset(before)


@contextlib.contextmanager
def working(words: str, *, stream: TextIO | None = None, after: float = AFTER_SECONDS) -> Iterator[None]:
    """Say what is done, and for how long already, once it takes longer than a second; then take it back.

    Only in a terminal: a log or a pipe gets nothing of it. What lies within another such stretch is part of
    that one.
    """
    out = sys.stderr if stream is None else stream
    if _is_drawing.get() or not out.isatty():
        yield
        return
    from fleetplane.cli.output import flat

    over, began = threading.Event(), time.monotonic()

    def draw() -> None:
        if over.wait(after):
            return
        while True:
            text = f"{flat(words)} … {time.monotonic() - began:.0f} s"
            with contextlib.suppress(OSError, ValueError):  # a terminal that is gone needs no sign
                out.write(f"\r\x1b[K{text[:WIDTH]}")
                out.flush()
            if over.wait(EVERY_SECONDS):
                break
        with contextlib.suppress(OSError, ValueError):
            out.write("\r\x1b[K")
            out.flush()

    drawer = threading.Thread(target=draw, name="progress", daemon=True)
    drawer.start()
    try:
        with drawing():
            yield
    finally:
        over.set()
        drawer.join()
