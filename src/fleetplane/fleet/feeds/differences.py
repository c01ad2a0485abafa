"""What one reader was sent of a changing table, and the difference from what the table is now.

For facts that follow from more than the store and have no history: they are sent whole when a connection
begins, and by difference afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Differences(Generic[K, V]):
    def __init__(self) -> None:
        self._sent: dict[K, V] = {}
        self._seen: Mapping[K, V] | None = None

    def __repr__(self) -> str:
        return f"<Differences sent={len(self._sent)}>"

    @property
    def is_new(self) -> bool:
        """Whether nothing was compared yet."""
        return self._seen is None

    def put(self, key: K, value: V) -> None:
        """The reader was sent this entry in another way."""
        self._sent[key] = value

    def forget(self, key: K) -> None:
        """The reader learned in another way that the entry is gone."""
        self._sent.pop(key, None)

    def changed(self, current: Mapping[K, V]) -> dict[K, V]:
        """Entries that are new or different; a table that is the same object as before costs nothing."""
        if current is self._seen:
            return {}
        self._seen = current
        found = {key: value for key, value in current.items() if self._sent.get(key) != value}
        self._sent |= found
        return found

    def gone(self, current: Mapping[K, V]) -> list[K]:
        """Entries that were sent and are no longer there, in the order in which they were first sent."""
        found = [key for key in self._sent if key not in current]
        for key in found:
            del self._sent[key]
        return found
