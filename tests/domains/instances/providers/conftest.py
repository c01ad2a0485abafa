"""A real server that speaks AWS's API, as a process of its own on loopback."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import Queue
from typing import IO

import pytest

STARTUP_SECONDS = 60.0


def _find_address(stream: IO[str], found: Queue[str]) -> None:
    # Read to the end, so that the server is never blocked by a full pipe.
    for line in stream:
        if match := re.search(r"http://127\.0\.0\.1:\d+", line):
            found.put(match[0])


@pytest.fixture(scope="session")
def aws_endpoint() -> Iterator[str]:
    """The address of a moto server; one per test process, shared by its tests."""
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    found: Queue[str] = Queue()
    reader = threading.Thread(target=_find_address, args=(server.stderr, found), daemon=True)
    reader.start()
    try:
        yield found.get(timeout=STARTUP_SECONDS)
    finally:
        server.kill()
        server.wait()
        reader.join()
        server.stderr.close()
