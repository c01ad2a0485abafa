"""Calls of the resource API: what is asked and what an answer means. Pure; transports carry them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from fleetplane.kernel import errors
from fleetplane.kernel.errors import FleetplaneError, IntegrityError

PREFIX = "/apis/v1"
PAGE = 500
"""Objects asked for at once; some 500 KB."""
ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
"""Of one answer: more than a page of the largest objects. A server that sends more is not believed."""
EVENT_LIMIT_BYTES = 8 * 1024 * 1024
"""Of one line of a watch: an object of the largest size, several times over."""
JSON = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, as every transport takes it."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """Path and query, as they go over the wire."""
        given = {key: value for key, value in self.query.items() if value != ""}
        return self.path + (f"?{urlencode(given)}" if given else "")

    @property
    def content(self) -> bytes | None:
        """The body as JSON."""
        if self.body is None:
            return None
        return json.dumps(self.body, ensure_ascii=False, separators=(",", ":")).encode()

    @property
    def is_repeatable(self) -> bool:
        """Whether asking twice does nothing twice."""
        return self.method == "GET"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One answer, read whole."""

    status: int
    headers: Mapping[str, str]
    """By names in lower case."""
    body: bytes = field(repr=False)

    def content(self) -> Any:
        """What was answered; raises what the server refused with."""
        if self.status >= 400:
            raise refusal(self)
        if not self.body:
            return None
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"the server's answer is no JSON: {str(error)[:200]}") from error


def read(path: str, **query: str) -> Request:
    """A request that only reads."""
    return Request(method="GET", path=PREFIX + path, query=query)


def object_path(plural: str, name: str, *more: str) -> str:
    """The path of one object, and of what belongs to it."""
    return PREFIX + "".join(f"/{quote(part, safe='')}" for part in (plural, name, *more))


def page_of(content: Any, *, rows: str = "items") -> tuple[list[Any], str, int]:
    """The entries of a page, where the next one begins (empty: nowhere), and the list's revision."""
    try:
        entries, following = content[rows], content.get("continue") or ""
        if not isinstance(entries, list) or not isinstance(following, str):
            raise TypeError("a page's entries are a list")
        return entries, following, int(content["revision"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"the server's answer is no list: {error!r}") from error


_BY_STATUS: Mapping[int, type[FleetplaneError]] = {
    400: errors.InvalidArgument,
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.NotFound,
    405: errors.Unimplemented,
    409: errors.Conflict,
    410: errors.Compacted,
    412: errors.PreconditionFailed,
    413: errors.InvalidArgument,
    422: errors.InvalidArgument,
    428: errors.FailedPrecondition,
    429: errors.ResourceExhausted,
    502: errors.Unavailable,
    503: errors.Unavailable,
    504: errors.Unavailable,
}


def _classes(root: type[FleetplaneError] = FleetplaneError) -> Iterable[type[FleetplaneError]]:
    yield root
    for one in root.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from _classes(one)


_BY_REASON = {
    "".join(part.capitalize() for part in one.reason.split("_")): one
    for one in _classes()
    if "reason" in vars(one) and one is not FleetplaneError
}
TEXT_LIMIT = 2000
"""Characters of a message that are shown, whatever a server sends."""


def refusal(response: Response) -> FleetplaneError:
    """The error that an answer stands for: problem details of RFC 9457, or whatever came instead."""
    try:
        told = json.loads(response.body)
        if not isinstance(told, dict):
            told = {}
    except (ValueError, RecursionError):
        told = {}
    return problem(told, response.status, response.headers)


def problem(told: Mapping[str, Any], status: int, headers: Mapping[str, str]) -> FleetplaneError:
    """The error that problem details stand for."""
    kind = _BY_REASON.get(str(told.get("reason", ""))) or _BY_STATUS.get(status, FleetplaneError)
    message = str(told.get("detail") or told.get("title") or f"the server answered {status}")
    field_ = str(told.get("field") or "")
    fields = [one for one in told.get("errors") or () if isinstance(one, Mapping)]
    if len(fields) > 1:
        message += ": " + "; ".join(f"{one.get('field')}: {one.get('detail')}" for one in fields[:10])
    elif field_ and field_ not in message:
        message = f"{field_}: {message}"
    details = {
        name: str(told[key])[:TEXT_LIMIT]
        for name, key in (("reason", "reason"), ("request_id", "requestId"))
        if told.get(key)
    }
    retry = headers.get("retry-after", "")
    return kind(
        message[:TEXT_LIMIT],
        field=field_ or None,
        hint=str(told["hint"])[:TEXT_LIMIT] if told.get("hint") else None,
        retry_after_seconds=float(retry) if retry.isascii() and retry.isdigit() and len(retry) < 6 else None,
        details=details,
    )
