"""Bodies that servers gave before their routes had typed answers, and whether the shapes write them again.

A file has one body a line: the route, a tab, the body. A body that its route's shape reads and writes again
must be the same bytes: no field lost, none added, numbers and nulls as they were, keys in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from fleetplane.web.rest.routes import Route


def differences(
    recorded: Path, routes: Iterable[Route], *, further: Mapping[str, type] | None = None
) -> list[str]:
    """Routes whose shape does not write a recorded body again, with what it writes.

    `further` has the shapes of bodies that are recorded under another name than their route's.
    """
    shapes = {route.name: route.answer_shape for route in routes} | dict(further or {})
    found = []
    for name, body in _lines(recorded):
        try:
            again = msgspec.json.encode(msgspec.json.decode(body, type=shapes[name]))
        except msgspec.MsgspecError as error:
            found.append(f"{name}: {error}: {body!r}")
            continue
        if again != body:
            found.append(f"{name}: {body!r} becomes {again!r}")
    return found


def not_recorded(recorded: Path, routes: Iterable[Route]) -> set[str]:
    """Routes with an answer of which no body is recorded."""
    known = {name for name, _ in _lines(recorded)}
    return {route.name for route in routes if route.answer_shape is not None} - known


def _lines(recorded: Path) -> Iterable[tuple[str, bytes]]:
    for line in recorded.read_bytes().splitlines():
        name, _, body = line.partition(b"\t")
        yield name.decode(), body
