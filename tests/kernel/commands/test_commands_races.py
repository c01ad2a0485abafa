"""What happens to a target while its command is being written down."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from support.kernel.leaving import leave_while_written
from support.shared.commandkit import SCOPE, FakeCourier, ledger

from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Command, Commands, CommandState, state_of
from fleetplane.kernel.store import Store
from fleetplane.sim.clock import VirtualClock


def outcome(commands: Commands, command: Command) -> CommandState:
    (target,) = commands.targets(command)
    return state_of(target)


async def test_a_target_that_leaves_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here, courier.limits = {"a"}, {"a": 0}
    async with ledger(tmp_path, VirtualClock(), courier) as (_, commands):
        issuing = asyncio.create_task(commands.issue(SCOPE, "go", ["a"], actor="boss"))
        await asyncio.sleep(0)  # it has decided that there is no room, and is being written
        courier.here.clear()
        await commands.lost("a")
        assert outcome(commands, await issuing) is CommandState.UNDELIVERABLE


async def test_room_that_comes_free_meanwhile_is_used(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here, courier.limits = {"a"}, {"a": 0}
    async with ledger(tmp_path, VirtualClock(), courier) as (_, commands):
        issuing = asyncio.create_task(commands.issue(SCOPE, "go", ["a"], actor="boss"))
        await asyncio.sleep(0)
        courier.limits.clear()
        await commands.room("a")
        command = await issuing
        assert courier.delivered == [("a", "go", command.name)]
        assert outcome(commands, command) is CommandState.SENT


async def test_the_same_holds_for_what_was_held(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here, courier.limits = {"a"}, {"a": 0}
    async with ledger(tmp_path, VirtualClock(), courier) as (_, commands):
        command = await commands.issue(SCOPE, "go", ["a"], actor="boss", hold=True)
        releasing = asyncio.create_task(commands.release(command, ["a"]))
        await asyncio.sleep(0)
        courier.here.clear()
        await commands.lost("a")
        await releasing
        assert outcome(commands, command) is CommandState.UNDELIVERABLE


async def released_meanwhile(store: Store, commands: Commands, targets: list[str]) -> Command:
    """Cancel a held command while it is being written down that its targets get it."""
    command = await commands.issue(SCOPE, "go", targets, actor="boss", hold=True)
    releasing = asyncio.create_task(commands.release(command, targets))
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while store.statistics().queued:
            await asyncio.sleep(0)
    assert not releasing.done()
    await commands.cancel(SCOPE, command.name, actor="boss", reason="enough")
    await releasing
    return command


async def test_a_target_that_gets_a_command_while_it_is_cancelled_is_told(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here = {"a"}
    async with ledger(tmp_path, VirtualClock(), courier) as (store, commands):
        command = await released_meanwhile(store, commands, ["a", "away"])
        assert courier.delivered == [("a", "go", command.name)]
        assert courier.recalled == [("a", command.name, "enough")]
        states = {target.name: state_of(target) for target in commands.targets(command)}
        assert states == {"a": CommandState.CANCELLED, "away": CommandState.UNDELIVERABLE}


async def test_one_that_cannot_stop_keeps_what_it_got_while_that_was_cancelled(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here = {"deaf"}
    async with ledger(tmp_path, VirtualClock(), courier, stops=lambda _: False) as (store, commands):
        command = await released_meanwhile(store, commands, ["deaf"])
        assert courier.recalled == [("deaf", command.name, "enough")]
        assert outcome(commands, command) is CommandState.SENT
        assert await commands.answered("deaf", command.name, ok=True)
        assert outcome(commands, command) is CommandState.OK


async def left_alone(store: Store, asked: Coroutine[Any, Any, Any]) -> None:
    await leave_while_written(store, asked)
    await store.settled(COMMAND_TARGET)


async def test_what_is_written_down_as_sent_is_sent_although_its_issuer_left(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here = {"a"}
    async with ledger(tmp_path, VirtualClock(), courier) as (store, commands):
        await left_alone(store, commands.issue(SCOPE, "go", ["a"], actor="boss"))
        (command,) = store.list(COMMAND)
        assert outcome(commands, command) is CommandState.SENT
        assert courier.delivered == [("a", "go", command.name)]


async def test_a_target_is_told_of_a_cancellation_although_its_author_left(tmp_path: Path) -> None:
    courier = FakeCourier()
    courier.here = {"a"}
    async with ledger(tmp_path, VirtualClock(), courier) as (store, commands):
        command = await commands.issue(SCOPE, "go", ["a"], actor="boss")
        await left_alone(store, commands.cancel(SCOPE, command.name, actor="boss", reason="enough"))
        assert outcome(commands, command) is CommandState.CANCELLED
        assert courier.recalled == [("a", command.name, "enough")]
