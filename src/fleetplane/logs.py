"""Structured logging: one event per line, stable event names. Owns the process's logging state."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final, TextIO, TypeAlias, cast

if TYPE_CHECKING:
    import structlog
else:
    UNUSED: Final = ("better_exceptions", "colorama", "greenlet", "rich", "twisted")
    """structlog imports each of these if it is installed. We use none of them through it, and rich alone
    takes five megabytes of every agent."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # None: the import fails, as if it were not installed
    try:
        structlog = import_module("structlog")
    finally:
        for name in hidden:
            del sys.modules[name]

PIECE_CHARACTERS = 1024
"""At most 4,096 bytes: what a pipe that has room takes whole, so that writing it never waits."""


class Unfailing:
    """A stream that drops what it cannot write, now or at all.

    A full disk, a reader that went away or one that stopped reading must not stop the server that
    would have told of it: an exception out of a log call ends calls, controllers and, through them,
    the process; a log call that waits holds up everyone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._room: select.poll | None = None
        self._lost = 0
        self._torn = ""
        """What ends a line of which only the beginning was written."""
        with contextlib.suppress(OSError, ValueError):  # not every stream is a file
            descriptor = stream.fileno()
            self._room = select.poll()
            self._room.register(descriptor, select.POLLOUT)

    def write(self, text: str) -> int:
        if self._lost and self._has_room():
            lost = {"event": "log.lines_lost", "level": "warning", "lines": self._lost}
            self._put(self._torn + json.dumps(lost) + "\n")
            self._lost, self._torn = 0, ""
        for start in range(0, len(text), PIECE_CHARACTERS):
            if not self._has_room():
                self._lost += 1
                self._torn = "\n" if start else self._torn
                break
            self._put(text[start : start + PIECE_CHARACTERS])
        return len(text)

    def flush(self) -> None:
        """Nothing to do: every piece has been flushed, while there was room for it."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _has_room(self) -> bool:
        return self._room is None or bool(self._room.poll(0))

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
            self._stream.write(text)
            self._stream.flush()


Logger: TypeAlias = "structlog.typing.FilteringBoundLogger"


def logger(**context: object) -> Logger:
    """A logger whose events carry this context."""
    found: Logger = structlog.get_logger()
    return found.bind(**context)


def observe(processor: structlog.typing.Processor) -> None:
    """Show every event to a processor before it is rendered."""
    *before, renderer = structlog.get_config()["processors"]
    structlog.configure(processors=[*before, processor, renderer])


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
