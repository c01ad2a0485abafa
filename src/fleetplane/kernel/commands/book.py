"""The targets of one channel as they are written down, and the way to the open ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fleetplane.kernel.commands import steps
from fleetplane.kernel.commands.index import OpenIndex
from fleetplane.kernel.commands.kinds import COMMAND, COMMAND_TARGET, Command, CommandTarget
from fleetplane.kernel.commands.steps import Move
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Store

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
                partial(steps.take, moves=batch),
                actor=actor or self.actor,
                action="command.step",
                touches=touches,
            )
            for target in done.value:
                self.noted(target.key)  # as it is now: others may have moved it on
            moved += [target.key for target in done.value]
        return moved
