"""Logs of objects: what is asked, and what the events of an answer mean. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fleetplane.client.calls import EVENTS, Request, object_path, problem
from fleetplane.kernel.errors import IntegrityError, Unavailable

TAIL = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of an object's log."""

    at: str
    """RFC 3339; empty where it is not known."""
    level: str
    """As its source names levels; empty where it has none."""
    source: str
    """What of the object wrote it: a unit, a file, `access`, the target of a run."""
    message: str
    dropped: int = 0
    """How many before it are missing, since the reader was too slow for them."""


def request(
    plural: str,
    name: str,
    *,
    scope: str = "",
    tail: int = TAIL,
    follow: bool = False,
    level: str = "",
    source: str = "",
    contains: str = "",
) -> Request:
    """Read or follow the log of one object."""
    query = {
        "scope": scope,
        "tail": str(tail),
        "follow": "true" if follow else "",
        "level": level,
        "source": source,
        "contains": contains,
    }
    return Request(
        method="GET", path=object_path(plural, name, "logs"), query=query, headers={"accept": EVENTS}
    )


@dataclass(slots=True)
class LogReader:
    """From events to lines; knows whether the log has been told to its end."""

    is_over: bool = False

    def on_event(self, kind: str, data: str) -> LogLine | None:
        """The line of an event; raises what the server could not go on for."""
        if kind == "end":
            self.is_over = True
            return None
        if kind not in ("entry", "error"):
            return None  # of a later version
        try:
            told = json.loads(data)
            if kind == "entry":
                return LogLine(
                    at=str(told["at"]),
                    level=str(told["level"]),
                    source=str(told["source"]),
                    message=str(told["message"]),
                    dropped=int(told.get("dropped", 0)),
                )
            refused = problem(
                {"detail": told["message"], "reason": told.get("reason"), "field": told.get("field")},
                int(told["status"]),
                {},
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"the server's answer is no log: {error!r}") from error
        raise refused

    def check_over(self) -> None:
        """Refuse a log that broke off."""
        if not self.is_over:
            raise Unavailable("the log broke off; read it again to go on")
