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
        self.delivered: list[tuple[str, str, str]] = []
        """Target, verb and the command's id, in order."""

    def is_present(self, target: str) -> bool:
        return target in self.here

    def deliver(self, target: str, command: Command) -> bool:
        if target not in self.here or target in self.full:
            return False
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
