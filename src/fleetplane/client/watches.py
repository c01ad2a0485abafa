"""Server-sent events to changes of a watch, over any number of connections, and to log lines. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fleetplane.client.calls import EVENTS, PREFIX, Request, object_path, problem
from fleetplane.client.objects import Change, Object
from fleetplane.kernel.clock import Backoff
from fleetplane.kernel.errors import (
    Compacted,
    FleetplaneError,
    IntegrityError,
    ResourceExhausted,
    Unavailable,
)

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


RECONNECT = Backoff(first_seconds=0.2, ceiling_seconds=10.0)
CHANGES = ("added", "modified", "deleted")


class EventReader:
    """Lines of a stream to events, as HTML's server-sent events are read."""

    def __init__(self) -> None:
        self._mark, self._kind = "", ""
        self._data: list[str] = []

    def line(self, line: str) -> tuple[str, str, str] | None:
        """The event (mark, kind, data) that ends with this line, if one does."""
        if not line:
            made = (self._mark, self._kind, "\n".join(self._data)) if self._data else None
            self._mark, self._kind, self._data = "", "", []
            return made
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "id":
                self._mark = value
            case "event":
                self._kind = value
            case "data":
                self._data.append(value)
        return None


@dataclass(slots=True, kw_only=True)
class Watch:
    """What a watcher knows: the objects, and the revision up to which it has seen everything.

    Every connection goes on where the one before ended. A server that no longer keeps what came since is
    asked for everything there is, and the differences to what was known are told.
    """

    of: str
    """Resources, with or without scopes: `gpus,instances@/tenants/acme`."""
    labels: str = ""
    fields: str = ""
    after: int | None = None
    raise_compacted: bool = False
    """Raise `Compacted` instead of telling the differences."""
    known: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    _snapshot: set[tuple[str, str, str]] | None = None
    """What the snapshot that is being read has told so far."""
    _failures: int = 0

    def request(self) -> Request:
        """The next connection's request."""
        self._snapshot = set() if self.after is None else None
        return Request(
            method="GET",
            path=f"{PREFIX}/watch",
            query={
                "of": self.of,
                "labels": self.labels,
                "fields": self.fields,
                "after": "" if self.after is None else str(self.after),
            },
            headers={"accept": EVENTS},
        )

    def on_event(self, mark: str, kind: str, data: str) -> Iterator[Change]:
        """What an event says that was not known before."""
        self._failures = 0
        revision = int(mark) if mark.isascii() and mark.isdecimal() else 0
        if kind in CHANGES:
            found = Object.of(_decoded(data))
            yield from self._on_change(kind, found, revision)
        elif kind == "compacted":
            if self.raise_compacted:
                raise Compacted("what came since is no longer kept")
            self.after = None
            return
        elif kind == "bookmark" and self._snapshot is not None:
            for key in sorted(self.known.keys() - self._snapshot):
                yield Change(type="deleted", object=self.known.pop(key), revision=revision)
            self._snapshot = None
        if revision:
            self.after = revision

    def _on_change(self, kind: str, found: Object, revision: int) -> Iterator[Change]:
        if self._snapshot is not None:
            self._snapshot.add(found.key)
        before = self.known.get(found.key)
        if kind == "deleted":
            if self.known.pop(found.key, None) is not None or self._snapshot is None:
                last = found if "spec" in found.raw else before or found
                yield Change(type=kind, object=last, revision=revision)
            return
        self.known[found.key] = found
        if before is None:
            yield Change(type=kind, object=found, revision=revision)
        elif before.metadata.revision != found.metadata.revision or before.raw != found.raw:
            yield Change(type="modified", object=found, revision=revision)

    def on_end(self, error: BaseException | None, *, jitter: float) -> float:
        """How long to wait before the next connection; raises an error that another would not mend."""
        if isinstance(error, Compacted) and not self.raise_compacted:
            self.after = None
        elif error is not None and not is_passing(error):
            raise error
        delay = RECONNECT.delay_seconds(self._failures, jitter=jitter)
        self._failures += 1
        wanted = error.retry_after_seconds if isinstance(error, FleetplaneError) else None
        return max(delay, wanted or 0.0)


def is_passing(error: BaseException) -> bool:
    """Whether the server or the way to it may be back in a moment."""
    return isinstance(error, Unavailable | ResourceExhausted | TimeoutError) or type(error) is FleetplaneError


def _decoded(data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"an event of the server is no JSON: {str(error)[:200]}") from error
