"""A courier whose targets come and go on request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Command, Commands
from fleetplane.kernel.store import Store, StoreSettings

SCOPE = "org/a"


class FakeCourier:
    def __init__(self) -> None:
        self.here: set[str] = set()
        self.full: set[str] = set()
        self.unusable: set[str] = set()
        """Ids of commands that cannot be encoded."""
        self.delivered: list[tuple[str, str, str]] = []
        """Target, verb and the command's id, in order."""
        self.limits: dict[str, int] = {}
        """How many a target takes at once, where that is limited."""
        self.held: dict[str, set[str]] = {}
        self.recalled: list[tuple[str, str, str]] = []

    def is_present(self, target: str) -> bool:
        return target in self.here

    def has_room(self, target: str) -> bool:
        return len(self.held.get(target, ())) < self.limits.get(target, 1000)

    def recall(self, target: str, command: str, reason: str) -> None:
        self.recalled.append((target, command, reason))

    def deliver(self, target: str, command: Command) -> bool:
        if target not in self.here or target in self.full or not self.has_room(target):
            return False
        if command.name in self.unusable:
            raise ValueError("too deep")
        self.held.setdefault(target, set()).add(command.name)
        self.delivered.append((target, command.spec.verb, command.name))
        return True


@asynccontextmanager
async def ledger(
    folder: Path, clock: Clock, courier: FakeCourier, **options: Any
) -> AsyncIterator[tuple[Store, Commands]]:
    settings = StoreSettings(path=folder / "commands.db")
    async with Store.open(settings, kinds=(COMMAND, COMMAND_TARGET), clock=clock) as store:
        commands = Commands(store, clock, channel="test", courier=courier, **options)
        commands.recover()
        yield store, commands
