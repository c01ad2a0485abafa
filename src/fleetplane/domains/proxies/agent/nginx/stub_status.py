"""NGINX's own few figures. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_TEXT: Final = re.compile(
    rb"Active connections:\s*(\d+)\s+server accepts handled requests\s+(\d+)\s+(\d+)\s+(\d+)\s+"
    rb"Reading:\s*(\d+)\s+Writing:\s*(\d+)\s+Waiting:\s*(\d+)"
)


@dataclass(frozen=True, slots=True)
class StubStatus:
    active: int
    accepted: int
    handled: int
    requests: int
    reading: int
    writing: int
    waiting: int


def parse_stub_status(text: bytes) -> StubStatus | None:
    found = _TEXT.search(text)
    return None if found is None else StubStatus(*(int(number) for number in found.groups()))
