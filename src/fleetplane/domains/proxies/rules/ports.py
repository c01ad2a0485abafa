"""Ports that streams may listen on: an allow-list of the server's owner. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fleetplane.kernel.errors import SettingsError

PORT_LIMIT = 65_535
_RANGE = re.compile(r"(?P<low>[0-9]{1,5})(?:-(?P<high>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class PortRanges:
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, texts: Sequence[str], *, field: str) -> PortRanges:
        """From texts such as `443` and `1024-65535`."""
        made = []
        for text in texts:
            found = _RANGE.fullmatch(text.strip())
            low = int(found["low"]) if found else 0
            high = int(found["high"] or low) if found else 0
            if not 1 <= low <= high <= PORT_LIMIT:
                raise SettingsError(
                    f"{field}: {text!r} is no port and no range of ports", hint="write 443, or 1024-65535"
                )
            made.append((low, high))
        return cls(tuple(made))

    def __contains__(self, port: int) -> bool:
        return any(low <= port <= high for low, high in self.ranges)

    def __str__(self) -> str:
        return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in self.ranges) or "none"


DEFAULT_STREAM_PORTS = ("443", "1024-65535")
"""What needs no privilege, and the port of TLS that is passed on by name. A port below, such as that of mail
or of names, is the owner's to allow."""
ANY_PORT = PortRanges(((1, PORT_LIMIT),))
