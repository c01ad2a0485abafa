"""Structured logging: one event per line, stable event names. Owns the process's logging state."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog


class Unfailing:
    """A stream that drops what it cannot write.

    A full disk or a reader that went away must not stop the server that would have told of it: an
    exception out of a log call ends calls, controllers and, through them, the process.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


def configure(*, level: str, log_format: str, stream: TextIO = sys.stderr) -> None:
    """Send our events, and those of libraries that use the standard module, to one stream."""
    lasting = Unfailing(stream)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: structlog.typing.Processor
    if log_format == "json":
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer(sort_keys=False)
    else:
        # Places, not values: the local variables of a failing call may hold keys and secrets.
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), pad_event_to=28, exception_formatter=structlog.dev.plain_traceback
        )
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", lasting)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(lasting)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # Libraries speak up from warnings on; their chatter would bury our events.
    root.setLevel(max(threshold, logging.WARNING))
