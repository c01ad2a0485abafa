"""Commands carried by calls: bounded for each target and in all, one outcome each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fleetplane.fleet.streams.courier import Answered, CallCourier
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.commands import COMMAND, COMMAND_TARGET, Command, Commands, CommandState, state_of
from fleetplane.kernel.store import Store, StoreSettings

SCOPE = "org/a"


class Boards:
    """Targets that answer when they are let to."""

    def __init__(self) -> None:
        self.under_way: list[tuple[str, str]] = []
        self.most = 0
        self.ended: list[str] = []
        self.let = asyncio.Event()
        self.answer: Callable[[str], Answered | None] = lambda _target: Answered(
            state=CommandState.OK, detail="ok"
        )

    async def call(self, target: str, command: Command) -> Answered | None:
        self.under_way.append((target, command.spec.verb))
        self.most = max(self.most, len(self.under_way))
        try:
            await self.let.wait()
            return self.answer(target)
        finally:
            self.under_way.remove((target, command.spec.verb))
            self.ended.append(target)


class CallRig:
    def __init__(self, store: Store, *, per_target: int = 2, at_once: int = 100) -> None:
        self.clock = SystemClock()
        self.boards = Boards()
        self.courier = CallCourier(
            channel="test",
            per_target=per_target,
            at_once=at_once,
            is_present=lambda name: name != "away",
            call=self.boards.call,
        )
        self.ledger = Commands(store, self.clock, channel="test", courier=self.courier)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            works = (self.courier.run(self.ledger, self.clock), self.ledger.run_here())
            running = [tasks.create_task(work) for work in works]
            await asyncio.sleep(0)
            yield
            for task in running:
                task.cancel()

    async def issue(self, *targets: str, verb: str = "x") -> Command:
        return await self.ledger.issue(SCOPE, verb, targets, actor="u", repeatable=False)

    async def outcomes(self, command: Command) -> dict[str, tuple[CommandState, str]]:
        async with asyncio.timeout(60):
            await self.ledger.finished(command)
        return {
            one.name: (state_of(one), one.status.detail if one.status is not None else "")
            for one in self.ledger.targets(command)
        }


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    settings = StoreSettings(path=tmp_path / "commands.db")
    async with Store.open(settings, kinds=(COMMAND, COMMAND_TARGET), clock=SystemClock()) as store:
        yield store


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_target_has_so_many_calls_and_the_next_when_one_ends(store: Store) -> None:
    rig = CallRig(store)
    async with rig.running():
        issued = [await rig.issue("a", verb=str(number)) for number in range(4)]
        await until(lambda: len(rig.boards.under_way) == 2)
        await asyncio.sleep(0.02)
        assert [verb for _, verb in rig.boards.under_way] == ["0", "1"]
        rig.boards.let.set()
        for command in issued:
            assert await rig.outcomes(command) == {"a": (CommandState.OK, "ok")}
    assert rig.boards.most == 2


async def test_there_are_only_so_many_calls_in_all_and_everybody_has_a_turn(store: Store) -> None:
    rig = CallRig(store, at_once=3)
    async with rig.running():
        rig.boards.let.set()
        command = await rig.issue(*(f"board-{number}" for number in range(20)))
        found = await rig.outcomes(command)
    assert {state for state, _ in found.values()} == {CommandState.OK}
    assert rig.boards.most <= 3
    assert len(rig.boards.ended) == 20, "each was called once"


async def test_who_is_away_and_who_was_deleted(store: Store) -> None:
    rig = CallRig(store)
    assert not rig.courier.is_present("a"), "nobody is, before the courier runs"
    async with rig.running():
        away = await rig.outcomes(await rig.issue("away"))
        assert away["away"][0] is CommandState.UNDELIVERABLE
        rig.boards.let.set()
        rig.boards.answer = lambda _target: None
        command = await rig.issue("a")
        await until(lambda: rig.boards.ended == ["a"])
        await rig.ledger.removed("a")
        assert (await rig.outcomes(command))["a"][0] is CommandState.FAILED


async def test_a_defect_costs_one_command_its_outcome_and_no_other(store: Store) -> None:
    def answer(target: str) -> Answered:
        if target == "a":
            raise ZeroDivisionError("oh")
        return Answered(state=CommandState.OK)

    rig = CallRig(store)
    rig.boards.answer = answer
    async with rig.running():
        rig.boards.let.set()
        found = await rig.outcomes(await rig.issue("a", "b"))
    assert found == {"a": (CommandState.FAILED, "ZeroDivisionError: oh"), "b": (CommandState.OK, "")}


async def test_taking_a_command_back_ends_the_call(store: Store) -> None:
    rig = CallRig(store)
    async with rig.running():
        command = await rig.issue("a")
        await until(lambda: rig.boards.under_way)
        await rig.ledger.cancel(SCOPE, command.name, actor="u")
        await until(lambda: not rig.boards.under_way)
        assert (await rig.outcomes(command))["a"][0] is CommandState.CANCELLED
        rig.boards.let.set()
        assert (await rig.outcomes(await rig.issue("a")))["a"][0] is CommandState.OK, (
            "its place is free again"
        )


async def test_the_place_of_a_call_that_was_taken_back_is_given_to_who_waits(store: Store) -> None:
    rig = CallRig(store, per_target=1, at_once=2)
    async with rig.running():
        first = await rig.issue("a", "b")
        await until(lambda: len(rig.boards.under_way) == 2)
        second, third = await rig.issue("a", verb="second"), await rig.issue("c", verb="third")
        await rig.ledger.cancel(SCOPE, first.name, actor="u")
        await until(lambda: sorted(rig.boards.under_way) == [("a", "second"), ("c", "third")])
        rig.boards.let.set()
        assert (await rig.outcomes(second))["a"][0] is CommandState.OK
        assert (await rig.outcomes(third))["c"][0] is CommandState.OK


async def test_a_command_that_is_taken_back_before_its_call_began_leaves_no_place_taken(store: Store) -> None:
    rig = CallRig(store, per_target=1)
    async with rig.running():
        command = await rig.issue("away")
        assert rig.courier.deliver("a", command)
        rig.courier.recall("a", command.name, "cancelled")
        await until(lambda: rig.courier.under_way == 0)
        assert rig.courier.has_room("a")
        assert rig.boards.ended == []
