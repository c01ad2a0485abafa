"""Boards that several servers hear in part: one judge of silence, and nobody flaps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from support.shared import virtual_loop
from support.shared.virtual_servers import VirtualServer, VirtualServers, until, virtual_servers

from fleetplane.domains.boards.inventory.boards import Boards, Came, status_of
from fleetplane.domains.boards.inventory.last_seen import BoardPresence
from fleetplane.domains.boards.inventory.liveness import LEEWAY_SECONDS, BoardController, BoardPolicy, Word
from fleetplane.domains.boards.joining.join_tokens import Approvals
from fleetplane.domains.boards.kinds import KINDS, BoardSilence, BoardState, number_of
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.presence.last_seen import LastSeen
from fleetplane.kernel.resources import Condition

HEARTBEAT_SECONDS = 30.0
STALE_SECONDS = 3 * HEARTBEAT_SECONDS + LEEWAY_SECONDS


class Rig:
    """Boards and their controller, on each of several servers."""

    def __init__(self) -> None:
        self.boards: dict[str, Boards] = {}
        self.controllers: dict[str, BoardController] = {}
        self.presence: dict[str, BoardPresence] = {}
        self.arrived: list[tuple[str, int]] = []
        self.servers: VirtualServers

    def _make(self, server: VirtualServer) -> BoardController:
        name = server.name
        self.boards[name], self.presence[name] = Boards(server.store), BoardPresence()
        made = BoardController(
            store=server.store,
            clock=server.clock,
            boards=self.boards[name],
            presence=self.presence[name],
            approvals=Approvals(server.store),
            join_tokens=None,  # type: ignore[arg-type]  # swept once an hour
            policy=BoardPolicy(heartbeat_seconds=HEARTBEAT_SECONDS),
            heard=LastSeen(server.store, server.clock, channel="boards"),
        )
        made.on_arrival(lambda number: self.arrived.append((name, number)))
        self.controllers[name] = made
        return made

    async def here(self, server: VirtualServer) -> None:
        await self._make(server).run_here()

    async def active(self, server: VirtualServer) -> None:
        made = self.controllers.get(server.name) or self._make(server)  # it may have stood by before
        made.take_over()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(made.run_here())
            tasks.create_task(made.run_active())

    async def start(self, name: str) -> VirtualServer:
        server = await self.servers.start(name)
        await until(lambda: name in self.controllers)
        return server

    async def join(self, name: str, called: str) -> int:
        came = Came(address="192.0.2.1", port=9091)
        board = await self.boards[name].create(BoardFacts(name=called), actor="test", came=came)
        self.controllers[name].came(board)
        await until(lambda: all(boards.get(number_of(board)) for boards in self.boards.values()))
        return number_of(board)

    async def hear(self, name: str, number: int, word: Word | None = None) -> None:
        await self.controllers[name].heard(number, word or Word(), actor="test")

    def silence(self, name: str, number: int) -> BoardSilence:
        return status_of(self.boards[name].require(number)).silence


def play(scene: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        rig = Rig()
        async with virtual_servers((*KERNEL_KINDS, *KINDS), here=rig.here, active=rig.active) as rig.servers:
            await scene(rig)

    virtual_loop.run(run())


def test_a_board_that_calls_another_server_each_time_never_flaps() -> None:
    async def scene(rig: Rig) -> None:
        servers = [await rig.start(name) for name in "abc"]
        number = await rig.join("b", "attic")
        await until(lambda: rig.arrived == [("a", number)])  # who calls boards learns it
        before = rig.boards["b"].require(number).revision
        for turn in range(40):
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await rig.hear("cb"[turn % 2], number)
        assert [rig.boards[one.name].require(number).revision for one in servers] == [before] * 3
        await asyncio.sleep(20)
        board = rig.boards["a"].require(number)
        seen = rig.presence["a"].last_seen_ns(board)
        assert seen is not None
        assert servers[0].clock.now_ns() - seen < 60 * 10**9

    play(scene)


def test_silence_is_declared_once_and_ended_by_whoever_hears_the_board() -> None:
    async def scene(rig: Rig) -> None:
        for name in "abc":
            await rig.start(name)
        number = await rig.join("b", "attic")
        began = asyncio.get_running_loop().time()
        await until(lambda: rig.silence("c", number) is BoardSilence.STALE)
        assert asyncio.get_running_loop().time() - began >= STALE_SECONDS - 1
        await rig.hear("c", number)
        await until(lambda: {rig.silence(name, number) for name in "abc"} == {BoardSilence.NONE})
        await until(lambda: rig.silence("b", number) is BoardSilence.DEAD)

    play(scene)


def test_nobody_is_silent_in_the_first_term_after_a_takeover() -> None:
    async def scene(rig: Rig) -> None:
        a, b, c = [await rig.start(name) for name in "abc"]
        number = await rig.join("a", "attic")
        await asyncio.sleep(STALE_SECONDS - 10)
        assert rig.silence("b", number) is BoardSilence.NONE
        a.kill()
        await until(lambda: b.is_active or c.is_active)
        taken = asyncio.get_running_loop().time()
        name = b.name if b.is_active else c.name
        await until(lambda: rig.silence(name, number) is BoardSilence.STALE)
        assert asyncio.get_running_loop().time() - taken >= STALE_SECONDS

    play(scene)


def test_a_board_that_no_server_heard_reads_unheard_after_a_takeover_and_others_do_not() -> None:
    async def scene(rig: Rig) -> None:
        a = await rig.start("a")
        there, lost = await rig.join("a", "there"), await rig.join("a", "lost")
        a.kill()
        await asyncio.sleep(40 * 60)
        b = await rig.start("b")
        await rig.hear("b", there)

        def unheard(number: int) -> bool:
            return status_of(rig.boards["b"].require(number)).unheard

        await until(lambda: b.is_active and unheard(lost))
        assert rig.silence("b", lost) is BoardSilence.NONE
        assert not unheard(there)
        await rig.hear("b", lost)
        assert not unheard(lost)

    play(scene)


def test_a_report_that_was_overtaken_on_another_server_changes_nothing() -> None:
    async def scene(rig: Rig) -> None:
        for name in "ab":
            await rig.start(name)
        number = await rig.join("a", "attic")
        await rig.hear("b", number, Word(state=BoardState.MAINTENANCE, boot_id="x", sequence=7))
        await until(lambda: status_of(rig.boards["a"].require(number)).reported is BoardState.MAINTENANCE)
        await rig.hear("a", number, Word(state=BoardState.READY, boot_id="x", sequence=6))
        assert status_of(rig.boards["a"].require(number)).reported is BoardState.MAINTENANCE
        await rig.hear("a", number, Word(state=BoardState.READY, boot_id="y", sequence=1))
        assert status_of(rig.boards["a"].require(number)).reported is None

    play(scene)


def test_what_two_servers_are_told_about_one_board_at_once_is_all_kept() -> None:
    async def scene(rig: Rig) -> None:
        for name in "abc":
            await rig.start(name)
        number = await rig.join("a", "attic")
        await asyncio.gather(
            *(
                rig.controllers[name].noted(number, [Condition(type=name, status="True")], actor="test")
                for name in "abc"
            )
        )
        await until(
            lambda: all(
                [one.type for one in boards.require(number).conditions] == list("abc")
                for boards in rig.boards.values()
            )
        )

    play(scene)


@pytest.mark.parametrize("heard_at", ["b", "c"])
def test_a_silence_that_was_declared_while_a_server_hears_the_board_is_undone(heard_at: str) -> None:
    async def scene(rig: Rig) -> None:
        for name in "abc":
            await rig.start(name)
        number = await rig.join(heard_at, "attic")
        await rig.boards["a"].silence(number, BoardSilence.STALE, last_seen_at_ns=None)
        await until(lambda: rig.silence("a", number) is BoardSilence.NONE)
        # What was judged was written since: nothing happens.
        await rig.boards["a"].silence(number, BoardSilence.STALE, last_seen_at_ns=None, judged=1)
        assert rig.silence("a", number) is BoardSilence.NONE

    play(scene)
