"""Ledgers of several servers over one database: any issues, the one that has the target's session sends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from support.shared import virtual_loop
from support.shared.commandkit import SCOPE, FakeCourier
from support.shared.presence_rig import CHANNEL, Cluster, Server, cluster, until

from fleetplane.kernel.commands import Command, Commands, CommandState, CommandTarget, run, state_of


class Side:
    """One server with its ledger, and the targets that are connected to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.courier = FakeCourier()
        self.ledger = Commands(
            server.store, server.clock, channel=CHANNEL, courier=self.courier, whereabouts=server.where
        )

    async def connect(self, target: str) -> int:
        session = await self.server.where.enter(target)
        await self.ledger.renewed(target, session=session)
        self.courier.here.add(target)
        await self.ledger.room(target)
        return session

    async def disconnect(self, target: str, session: int) -> bool:
        self.courier.here.discard(target)
        was_there = await self.server.where.leave(target, session)
        await self.ledger.lost(target, session=session)
        return was_there

    async def issue(self, *targets: str, wait: bool = False, repeatable: bool = False) -> Command:
        return await self.ledger.issue(SCOPE, "go", targets, actor="boss", wait=wait, repeatable=repeatable)

    def target(self, command: Command) -> CommandTarget:
        (found,) = self.ledger.targets(command)
        return found

    def state(self, command: Command) -> CommandState:
        return state_of(self.target(command))

    def counts(self, command: Command) -> Counter[CommandState]:
        return Counter(map(state_of, self.ledger.targets(command)))


@asynccontextmanager
async def sides(servers: Cluster, count: int) -> AsyncIterator[list[Side]]:
    made = [Side(await servers.start(name)) for name in "abc"[:count]]
    tasks = [asyncio.create_task(run(made[0].ledger, made[0].server.clock))]
    tasks += [asyncio.create_task(side.ledger.run_here()) for side in made[1:]]
    await asyncio.sleep(0)
    try:
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def played(scene: Callable[[list[Side]], Awaitable[None]], count: int = 2) -> None:
    async def play() -> None:
        async with cluster() as servers, sides(servers, count) as made:
            await scene(made)

    virtual_loop.run(play())


def test_a_command_reaches_its_target_on_another_server_and_the_answer_comes_back() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        session = await b.connect("one")
        command = await a.issue("one")
        assert a.state(command) is CommandState.WAITING
        await until(lambda: b.courier.delivered)
        assert b.courier.delivered == [("one", "go", command.name)]
        status = b.target(command).status
        assert status is not None
        assert (status.state, status.session, status.deliveries) == (CommandState.SENT, session, 1)
        assert await b.ledger.ended("one", command.name, CommandState.OK, detail="done", result=b"42")
        finished = await a.ledger.finished(command)
        assert finished.status is not None
        assert finished.status.outcomes == {CommandState.OK: 1}
        answered = a.target(command).status
        assert answered is not None
        assert (answered.detail, answered.result) == ("done", b"42")

    played(scene)


def test_presence_decides_whether_there_is_anybody_and_not_who_is_connected_here() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        assert a.state(await a.issue("one")) is CommandState.UNDELIVERABLE
        session = await b.connect("one")
        # This server may not have read yet that it came.
        assert a.state(await a.issue("one")) is CommandState.WAITING
        assert await b.disconnect("one", session)
        assert a.state(await a.issue("one")) is CommandState.UNDELIVERABLE
        assert a.state(await a.issue("one", wait=True)) is CommandState.WAITING

    played(scene)


def test_the_late_goodbye_of_an_older_session_takes_nothing_from_the_newer_one() -> None:
    async def scene(made: list[Side]) -> None:
        a, b, c = made
        first = await b.connect("one")
        old = await a.issue("one")
        await until(lambda: b.courier.delivered)
        second = await c.connect("one")
        new = await a.issue("one")
        await until(lambda: c.courier.delivered)
        await until(lambda: b.ledger.targets(new) and b.state(new) is CommandState.SENT)
        assert not await b.disconnect("one", first)
        await until(lambda: a.state(old) is CommandState.FAILED)
        assert a.state(new) is CommandState.SENT
        assert await c.disconnect("one", second)
        await until(lambda: a.state(new) is CommandState.FAILED)

    played(scene, 3)


def test_what_a_dead_server_had_sent_is_lost_when_its_target_is_elsewhere() -> None:
    async def scene(made: list[Side]) -> None:
        a, b, c = made
        await b.connect("one")
        once, again = await a.issue("one"), await a.issue("one", repeatable=True)
        await until(lambda: len(b.courier.delivered) == 2)
        b.server.kill()
        await c.connect("one")
        await c.ledger.lost("one")
        assert c.state(once) is CommandState.FAILED
        assert c.courier.delivered == [("one", "go", again.name)]

    played(scene, 3)


def test_a_session_that_begins_late_does_not_send_again_what_a_newer_one_has() -> None:
    async def scene(made: list[Side]) -> None:
        a, b, c = made
        first = await b.server.where.enter("one")
        await c.connect("one")
        command = await a.issue("one", repeatable=True)
        await until(lambda: c.courier.delivered)
        await until(lambda: b.ledger.targets(command) and b.state(command) is CommandState.SENT)
        await b.ledger.renewed("one", session=first)
        b.courier.here.add("one")
        await b.ledger.room("one")
        assert b.courier.delivered == []
        assert b.state(command) is CommandState.SENT

    played(scene, 3)


def test_what_is_cancelled_on_one_server_is_taken_back_by_the_one_that_has_the_target() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        await b.connect("one")
        command = await a.issue("one")
        await until(lambda: b.courier.delivered)
        await until(lambda: a.state(command) is CommandState.SENT)
        await a.ledger.cancel(SCOPE, command.name, actor="boss", reason="enough")
        await until(lambda: b.courier.recalled)
        assert b.courier.recalled == [("one", command.name, "enough")]
        assert a.courier.recalled == [("one", command.name, "enough")]  # its courier has no such target

    played(scene)


def test_an_answer_about_a_command_that_a_server_has_not_read_of_yet_is_taken() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        await a.connect("one")
        command = await a.issue("one")
        assert a.courier.delivered
        assert not b.ledger.targets(command)
        assert await b.ledger.ended("one", command.name, CommandState.OK)
        assert b.state(command) is CommandState.OK
        assert not await b.ledger.ended("one", "0" * 32, CommandState.OK)
        assert b.ledger.ignored == 1

    played(scene)


def test_a_target_that_leaves_before_its_command_was_taken_up_is_not_waited_for() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        session = await b.connect("one")
        b.courier.limits["one"] = 0
        command, patient = await a.issue("one"), await a.issue("one", wait=True)
        await b.disconnect("one", session)
        await until(lambda: a.state(command) is CommandState.UNDELIVERABLE)
        assert a.state(patient) is CommandState.WAITING
        b.courier.limits.clear()
        await b.connect("one")
        assert b.courier.delivered == [("one", "go", patient.name)]

    played(scene)


def test_what_was_held_is_released_to_targets_of_every_server() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        await a.connect("one")
        await b.connect("two")
        command = await a.ledger.issue(SCOPE, "go", ["one", "two", "three"], actor="boss", hold=True)
        await a.ledger.release(command, ["one", "two", "three"])
        assert a.courier.delivered == [("one", "go", command.name)]
        await until(lambda: b.courier.delivered)
        assert b.courier.delivered == [("two", "go", command.name)]
        await until(lambda: b.counts(command) == {CommandState.SENT: 2, CommandState.UNDELIVERABLE: 1})

    played(scene)


def test_what_found_no_room_is_sent_when_there_is_some_and_in_order() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        await b.connect("one")
        b.courier.limits["one"] = 1
        commands = [await a.issue("one") for _ in range(3)]
        for command in commands:
            await until(lambda: b.courier.held.get("one"))
            assert b.courier.delivered[-1][2] == command.name
            b.courier.held["one"].clear()
            assert await b.ledger.ended("one", command.name, CommandState.OK)
            await b.ledger.room("one")
        assert len(b.courier.delivered) == len(commands)

    played(scene)


def test_a_session_that_ended_while_it_was_written_down_is_sent_nothing() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        await b.connect("one")
        issuing = asyncio.create_task(b.issue("one"))
        await asyncio.sleep(0)  # it is to be sent in the session that there is, and is being written
        await a.connect("one")
        command = await issuing
        await until(lambda: a.courier.delivered or b.courier.delivered)
        await until(lambda: a.state(command) is CommandState.SENT)
        delivered = [*a.courier.delivered, *b.courier.delivered]
        assert delivered == [("one", "go", command.name)]

    played(scene)


def test_after_a_restart_only_what_nobody_has_any_more_is_lost() -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        session = await b.connect("one")
        command = await a.issue("one")
        await until(lambda: a.state(command) is CommandState.SENT)
        await a.ledger.all_lost()
        assert a.state(command) is CommandState.SENT
        assert await b.server.where.leave("one", session)  # and ends before it says what it had sent
        await until(lambda: not a.server.where.is_anywhere("one"))
        await a.ledger.all_lost()
        assert a.state(command) is CommandState.FAILED

    played(scene)


def test_deadlines_are_the_database_s_whatever_a_server_s_own_clock_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(made: list[Side]) -> None:
        a, _ = made
        a.server.clock.skew_seconds = 3600.0
        await a.connect("one")
        looks, expire = Counter[int](), a.ledger.expire

        async def counted() -> None:
            looks[0] += 1
            assert looks[0] < 200, "it looks all the time"
            await expire()

        monkeypatch.setattr(a.ledger, "expire", counted)
        command = await a.issue("one")
        await asyncio.sleep(55)
        assert a.state(command) is CommandState.SENT
        await until(lambda: a.state(command) is CommandState.TIMED_OUT)
        assert looks[0] >= 50

    played(scene)


def test_a_deadline_that_passes_while_the_database_is_away_counts_when_it_is_back() -> None:
    async def scene(made: list[Side]) -> None:
        a, _ = made
        await a.connect("one")
        command = await a.issue("one")
        await asyncio.sleep(59)
        a.server.link.cut = True
        await asyncio.sleep(4)
        assert a.state(command) is CommandState.SENT
        a.server.link.cut = False
        await until(lambda: a.state(command) is CommandState.TIMED_OUT)

    played(scene)


@pytest.mark.parametrize("at_issuer", [True, False])
def test_what_cannot_be_sent_ends_on_whichever_server_its_target_is_or_comes_to(at_issuer: bool) -> None:
    async def scene(made: list[Side]) -> None:
        a, b = made
        there = a if at_issuer else b
        unusable = await a.issue("one", wait=True, repeatable=True)
        there.courier.unusable = {unusable.name}
        good = await a.issue("one", wait=True)
        session = await there.connect("one")
        await until(lambda: there.courier.delivered)
        assert there.courier.delivered == [("one", "go", good.name)]
        assert (there.state(unusable), there.state(good)) == (CommandState.UNDELIVERABLE, CommandState.SENT)
        await there.disconnect("one", session)
        assert there.state(unusable) is CommandState.UNDELIVERABLE
        assert (await a.ledger.finished(unusable)).status is not None

    played(scene)
