"""A small part of JSONPath, as kubectl has it: `.a.b`, `[0]`, `[*]`, `['a.b']`, in braces or not. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from fleetplane.kernel.errors import InvalidArgument

_STEP = re.compile(
    r"""\.(?P<key>[A-Za-z_][\w-]*) | \[(?P<index>-?\d{1,9})\] | \[(?P<all>\*)\]
    | \[(?P<quote>['"])(?P<quoted>[^'"]*)(?P=quote)\]""",
    re.VERBOSE,
)
Step = str | int | None
"""A key, a place in a list, or (None) everything."""


def parsed(text: str) -> tuple[Step, ...]:
    """The steps of a path; raises `InvalidArgument`."""
    path = text.strip()
    if path.startswith("{") and path.endswith("}"):
        path = path[1:-1].strip()
    path = path.removeprefix("$")
    if path in ("", "."):
        return ()
    if path[0] not in ".[":
        path = "." + path
    steps: list[Step] = []
    place = 0
    while place < len(path):
        found = _STEP.match(path, place)
        if found is None:
            raise InvalidArgument(
                f"{text!r} is no path: {path[place:]!r} is not understood",
                field="output",
                hint="such as jsonpath=.items[*].metadata.name",
            )
        if found["index"] is not None:
            steps.append(int(found["index"]))
        else:
            steps.append(None if found["all"] else found["key"] or found["quoted"])
        place = found.end()
    return tuple(steps)


def values(data: Any, steps: tuple[Step, ...]) -> Iterator[Any]:
    """What lies at a path, in order; nothing where nothing does."""
    if not steps:
        yield data
        return
    step, rest = steps[0], steps[1:]
    if step is None:
        inside = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
        for one in inside:
            yield from values(one, rest)
    elif isinstance(step, int):
        if isinstance(data, list) and -len(data) <= step < len(data):
            yield from values(data[step], rest)
    elif isinstance(data, Mapping) and step in data:
        yield from values(data[step], rest)
