"""The stored targets of one channel, with an index of the open ones by target, command and next deadline.

The index only shortens the way to what the store holds; a restart builds it again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from fleetplane.kernel.commands import rules
from fleetplane.kernel.commands.rules import COMMAND, COMMAND_TARGET, Command, CommandTarget, Move, due_ns
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Store

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


BATCH = 256
"""Targets moved in one transaction, so that a large command never holds up other writers for long."""


class TargetBook:
    def __init__(self, store: Store, *, channel: str) -> None:
        self.store = store
        self.channel = channel
        self.actor = f"commands/{channel}"
        self.index = OpenIndex(self.find)

    def __repr__(self) -> str:
        return f"<TargetBook {self.channel} {self.index!r}>"

    def find(self, key: Key) -> CommandTarget | None:
        return self.store.get(COMMAND_TARGET, key.scope, key.name)

    def command_of(self, target: CommandTarget) -> Command | None:
        return self.store.get(COMMAND, target.spec.command_scope, target.spec.command)

    def recover(self) -> None:
        """Take up what is open."""
        for target in self.store.list(COMMAND_TARGET):
            if target.spec.channel == self.channel:
                self.index.note(target)

    def noted(self, key: Key) -> CommandTarget | None:
        """Take in what a target is like now; None if it is none of this channel, or gone."""
        current = self.find(key)
        if current is None or current.spec.channel != self.channel:
            return None
        self.index.note(current)
        return current

    async def move(self, moves: Sequence[Move], *, actor: str = "") -> list[Key]:
        """Take steps; the keys of those targets for which they meant something."""
        moved: list[Key] = []
        for start in range(0, len(moves), BATCH):
            batch = moves[start : start + BATCH]
            touches = {move.key for move in batch}
            for key in tuple(touches):
                target = self.find(key)
                if target is not None:
                    touches.add(COMMAND.key(target.spec.command_scope, target.spec.command))
            done = await self.store.transact(
                partial(rules.take, moves=batch),
                actor=actor or self.actor,
                action="command.step",
                touches=touches,
            )
            for target in done.value:
                self.noted(target.key)  # as it is now: others may have moved it on
            moved += [target.key for target in done.value]
        return moved
