"""What targets printed, for a while: in memory, bounded, and gone with the server."""

from __future__ import annotations

from collections import OrderedDict

OUTPUT_LIMIT = 64 * 1024
"""Characters kept of one target's output, its end: that is where errors are."""
OUTPUTS_LIMIT = 4 * 1024 * 1024
"""Characters kept in all; the oldest go first."""


class Outputs:
    def __init__(self, *, limit: int = OUTPUTS_LIMIT) -> None:
        self._limit = limit
        self._held = 0
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Outputs {len(self._texts)} characters={self._held}>"

    def add(self, command: str, target: str, text: str) -> None:
        known = self._texts.pop((command, target), "")
        kept = (known + text)[-OUTPUT_LIMIT:]
        self._texts[command, target] = kept
        self._held += len(kept) - len(known)
        while self._held > self._limit:
            _, oldest = self._texts.popitem(last=False)
            self._held -= len(oldest)

    def get(self, command: str, target: str) -> str:
        return self._texts.get((command, target), "")

    def forget(self, command: str, target: str) -> None:
        self._held -= len(self._texts.pop((command, target), ""))
