"""What is logged is enough to find a defect, and nothing that must stay secret."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
from collections.abc import Iterator
from typing import TextIO

import pytest
import structlog

from fleetplane import logs


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """The log's state is the process's; it is put back as it was."""
    root = logging.getLogger()
    before = (root.handlers, root.level)
    yield
    structlog.reset_defaults()
    root.handlers, root.level = before


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_shows_places_and_no_values(log_format: str) -> None:
    def sign(secret: str) -> None:
        raise RuntimeError(f"failed with {len(secret)} characters")

    stream = io.StringIO()
    logs.configure(level="info", log_format=log_format, stream=stream)
    try:
        sign(bytes.fromhex("7365637265742d6b6579").decode())
    except RuntimeError as error:
        structlog.get_logger().error("signing.failed", exc_info=error)
    text = stream.getvalue()

    assert "signing.failed" in text
    assert "in sign" in text
    assert "failed with 10 characters" in text
    assert "secret-key" not in text


class Refusing(io.StringIO):
    """A log whose disk is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_a_log_that_cannot_be_written_does_not_stop_who_writes_it(log_format: str) -> None:
    logs.configure(level="info", log_format=log_format, stream=Refusing())
    structlog.get_logger().info("something.happened")
    logging.getLogger("library").warning("so it goes")

    closed = io.StringIO()
    closed.close()
    logs.Unfailing(closed).write("x")
    logs.Unfailing(closed).flush()


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_reader_that_stopped_reading_holds_up_nobody_and_learns_what_it_missed(length: int) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "r") as reader, os.fdopen(write, "w") as writer:
        stream = logs.Unfailing(writer)
        for _ in range(2000):  # more than any pipe holds; each would wait for ever
            stream.write("x" * length + "\n")
        os.set_blocking(read, False)
        before = _all_of(reader)
        stream.write("after\n")
        *lines, told, after = (before + _all_of(reader)).splitlines()
        taken = len(lines)

    assert 0 < taken < 2000
    assert json.loads(told)["event"] == "log.lines_lost"
    assert 2000 - taken - 1 <= json.loads(told)["lines"] <= 2000
    assert after == "after"


def _all_of(reader: TextIO) -> str:
    text = ""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(reader.fileno(), 65536).decode():
            text += piece
    return text
