"""The process's standard streams: that there are three, and what happens when nobody is at the other end."""

from __future__ import annotations

import os
import sys


def hold() -> None:
    """See to it that descriptors 0, 1 and 2 are taken, whatever we were started with.

    Otherwise the next file to be opened gets the number of the closed stream: a database would then
    be where some library prints its warnings. What is put in place can be opened, but neither read
    nor written, so that lost output is an error and not a success.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY)  # the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def silence_stdout() -> None:
    """Discard further output after its reader has closed the pipe, so that not even the last flush fails."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
