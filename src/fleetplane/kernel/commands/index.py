"""A ledger's index of what is open: by target, by command, and by the next deadline.

Only a shorter way to what the store says; a restart builds it anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from fleetplane.kernel.commands.kinds import CommandTarget, due_ns
from fleetplane.kernel.resources import Key

SLACK = 256
"""Deadlines that were met and may lie in the heap, beside four for each open target."""

Find = Callable[[Key], CommandTarget | None]


class OpenIndex:
    def __init__(self, find: Find) -> None:
        self._find = find
        self._by_target: dict[str, dict[Key, int]] = {}
        """Its open commands, and the revision each was issued at, which is their order."""
        self._places: dict[tuple[str, str], Key] = {}
        """From a command's id and a target to where that is written."""
        self._due: list[tuple[int, Key]] = []

    def __repr__(self) -> str:
        return f"<OpenIndex open={len(self._places)} targets={len(self._by_target)}>"

    def __len__(self) -> int:
        return len(self._places)

    def note(self, target: CommandTarget) -> None:
        """Take in what a target is like now."""
        spec, key = target.spec, target.key
        due = due_ns(target)
        if due is None:
            self._places.pop((spec.command, spec.target), None)
            theirs = self._by_target.get(spec.target, {})
            theirs.pop(key, None)
            if not theirs:
                self._by_target.pop(spec.target, None)
            return
        self._places[spec.command, spec.target] = key
        self._by_target.setdefault(spec.target, {})[key] = target.created_revision
        self.look_again(due, key)
        if len(self._due) > 4 * len(self._places) + SLACK:  # mostly deadlines that were met
            self._due = sorted(self._deadlines())

    def place(self, command: str, target: str) -> Key | None:
        return self._places.get((command, target))

    def of(self, target: str) -> list[Key]:
        """A target's open commands in the order of their issue."""
        found = self._by_target.get(target, {})
        return sorted(found, key=lambda key: (found[key], key))

    def everything(self) -> list[Key]:
        return list(self._places.values())

    # Deadlines.

    def look_again(self, at_ns: int, key: Key) -> None:
        heapq.heappush(self._due, (at_ns, key))

    def next_due_ns(self) -> int | None:
        return self._due[0][0] if self._due else None

    def late(self, now_ns: int) -> list[Key]:
        """What was to be looked at by now, each once."""
        late: dict[Key, None] = {}
        while self._due and self._due[0][0] <= now_ns:
            late[heapq.heappop(self._due)[1]] = None
        return list(late)

    def _deadlines(self) -> Iterable[tuple[int, Key]]:
        for key in self._places.values():
            target = self._find(key)
            due = due_ns(target) if target is not None else None
            if due is not None:
                yield due, key
