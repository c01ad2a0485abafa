"""What holds for the tests of every domain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from fleetplane.web.rest import app
from fleetplane.web.rest.routes import Route


@pytest.fixture(autouse=True)
def answers_have_their_shape(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test in which a server of this process gave an answer of another shape than its route names."""
    wrong: list[str] = []
    encoded = app._encoded

    def checked(route: Route, content: Any) -> bytes:
        made = encoded(route, content)
        if route.answer_shape is not None and (problem := _difference(route.answer_shape, made)):
            wrong.append(f"{route.name}: {problem}")
        return made

    monkeypatch.setattr(app, "_encoded", checked)
    yield
    assert not wrong, wrong


def _difference(shape: Any, body: bytes) -> str:
    try:
        again = msgspec.json.encode(msgspec.json.decode(body, type=shape))
    except msgspec.MsgspecError as error:
        return f"{error}: {body!r}"
    return "" if msgspec.json.decode(again) == msgspec.json.decode(body) else f"{body!r} is read as {again!r}"
