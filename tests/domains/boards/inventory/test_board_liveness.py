"""Silence becomes a state and a word ends it, on a clock that moves only when told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fleetplane.domains.boards.inventory.boards import Boards, Came, status_of
from fleetplane.domains.boards.inventory.last_seen import CONNECTIONS_REMEMBERED, BoardPresence
from fleetplane.domains.boards.inventory.liveness import BoardController, BoardPolicy, Word
from fleetplane.domains.boards.joining.join_tokens import Approvals, JoinTokens
from fleetplane.domains.boards.kinds import KINDS, BoardSilence, BoardState
from fleetplane.domains.boards.resources import board_view
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.errors import NotFound
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

BOSS, SELF = "operator/boss", "board/1"
INTERVAL = 30.0


@dataclass(slots=True)
class Watchtower:
    store: Store
    clock: VirtualClock
    boards: Boards
    presence: BoardPresence
    controller: BoardController
    attention: StallDetector
    """Does not beat unless a test has it run."""

    async def come(self, name: str = "pi-1") -> int:
        board = await self.boards.create(
            BoardFacts(name=name), actor=BOSS, came=Came(address="10.0.0.1", port=9091)
        )
        self.controller.came(board)
        return int(board.name)

    async def report(self, number: int, state: BoardState | None = None) -> None:
        await self.controller.heard(number, Word(state=state), actor=SELF)

    async def wait(self, seconds: float) -> None:
        """Let time pass, and let what follows from it be written."""
        await self.clock.advance(seconds)
        for _ in range(50):
            await asyncio.sleep(0.002)
            if not self.store.statistics().queued and not self.controller.reconciler.statistics().running:
                break
        await asyncio.sleep(0.01)

    def state(self, number: int) -> BoardState:
        return status_of(self.boards.require(number)).state

    async def sees(self, number: int, state: BoardState) -> None:
        async with asyncio.timeout(60):
            while self.state(number) is not state:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def watchtower(folder: Path, clock: VirtualClock | None = None) -> AsyncIterator[Watchtower]:
    clock = clock or VirtualClock()
    settings = StoreSettings(path=folder / "state.db")
    async with Store.open(settings, kinds=[*KERNEL_KINDS, *KINDS], clock=clock) as store:
        authority = await Authority.load_or_create(store, MasterKey(b"k" * 32, clock), clock)
        boards, presence = Boards(store), BoardPresence()
        controller = BoardController(
            store=store,
            clock=clock,
            boards=boards,
            presence=presence,
            approvals=Approvals(store),
            join_tokens=JoinTokens(store, authority, clock),
            policy=BoardPolicy(heartbeat_seconds=INTERVAL),
            attention=(attention := StallDetector(clock)),
        )
        controller.take_over()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(controller.run_active())
            yield Watchtower(store, clock, boards, presence, controller, attention)
            running.cancel()


@pytest.fixture
async def tower(tmp_path: Path) -> AsyncIterator[Watchtower]:
    async with watchtower(tmp_path) as made:
        yield made


async def test_three_missing_reports_are_not_ready_ten_unknown_and_one_report_ends_it(
    tower: Watchtower,
) -> None:
    number = await tower.come()

    await tower.wait(3 * INTERVAL - 2)
    assert tower.state(number) is BoardState.READY
    await tower.wait(3)
    await tower.sees(number, BoardState.NOT_READY)
    await tower.wait(7 * INTERVAL - 4)
    assert tower.state(number) is BoardState.NOT_READY
    await tower.wait(5)
    await tower.sees(number, BoardState.UNKNOWN)

    await tower.report(number)

    assert tower.state(number) is BoardState.READY


async def test_reports_write_nothing_as_long_as_nothing_changes(tower: Watchtower) -> None:
    number = await tower.come()
    revision = tower.store.revision
    for _ in range(20):
        await tower.clock.advance(INTERVAL)
        await tower.report(number, BoardState.READY)

    assert tower.store.revision == revision
    board = tower.boards.require(number)
    assert tower.presence.last_seen_ns(board) == tower.clock.now_ns()


async def test_when_it_was_last_seen_is_written_with_the_silence(tower: Watchtower) -> None:
    number = await tower.come()
    await tower.clock.advance(INTERVAL)
    await tower.report(number)
    seen_ns = tower.clock.now_ns()

    await tower.wait(4 * INTERVAL)
    await tower.sees(number, BoardState.NOT_READY)

    assert status_of(tower.boards.require(number)).last_seen_at_ns == seen_ns


@pytest.mark.parametrize("declared", [BoardState.PROVISIONING, BoardState.MAINTENANCE, BoardState.FAILED])
async def test_silence_hides_no_declared_state_but_is_noted(tower: Watchtower, declared: BoardState) -> None:
    number = await tower.come()
    await tower.boards.declare(number, declared, actor=BOSS)

    await tower.wait(11 * INTERVAL)
    async with asyncio.timeout(60):
        while status_of(tower.boards.require(number)).silence is not BoardSilence.DEAD:
            await asyncio.sleep(0.002)

    assert tower.state(number) is declared


async def test_a_board_that_said_goodbye_is_not_missed(tower: Watchtower) -> None:
    number = await tower.come()
    await tower.report(number, BoardState.MAINTENANCE)

    await tower.wait(11 * INTERVAL)

    assert tower.state(number) is BoardState.MAINTENANCE


async def test_after_a_restart_boards_have_time_to_be_heard(tmp_path: Path) -> None:
    async with watchtower(tmp_path) as before:
        up, lost = await before.come("up"), await before.come("lost")
        await before.boards.silence(lost, BoardSilence.STALE, last_seen_at_ns=None)
        now_ns = before.clock.now_ns()
    async with watchtower(tmp_path, VirtualClock(start_ns=now_ns)) as tower:
        await tower.wait(2 * INTERVAL)
        assert (tower.state(up), tower.state(lost)) == (BoardState.READY, BoardState.NOT_READY)
        await tower.wait(2 * INTERVAL)
        await tower.sees(up, BoardState.NOT_READY)
        await tower.wait(4 * INTERVAL)
        await tower.sees(lost, BoardState.UNKNOWN)
        assert tower.state(up) is BoardState.NOT_READY


async def test_after_a_restart_a_board_reads_unheard_until_it_is_heard(tmp_path: Path) -> None:
    async with watchtower(tmp_path) as before:
        up, lost, resting = [await before.come(name) for name in ("up", "lost", "resting")]
        await before.report(resting, BoardState.MAINTENANCE)
        now_ns = before.clock.now_ns()
    async with watchtower(tmp_path, VirtualClock(start_ns=now_ns + 40 * 60 * 10**9)) as tower:

        def shown() -> list[str]:
            found = [board_view(tower.boards.require(one), tower.store).status for one in all_of_them]
            return [status.state for status in found if status is not None]

        all_of_them = up, lost, resting
        async with asyncio.timeout(60):
            while shown() != ["unheard", "unheard", "maintenance"]:
                await asyncio.sleep(0.002)
        assert tower.state(lost) is BoardState.READY  # what clients of the documented API know
        await tower.report(up)
        assert shown() == ["ready", "unheard", "maintenance"]
        revision = tower.store.revision
        await tower.report(up)
        assert tower.store.revision == revision
        await tower.wait(3 * INTERVAL + 1)
        await tower.sees(lost, BoardState.NOT_READY)
        assert shown()[1] == "not_ready"


async def test_a_board_nobody_ever_heard_is_not_missed(tower: Watchtower) -> None:
    board = await tower.boards.create(BoardFacts(name="on paper"), actor=BOSS)

    await tower.wait(20 * INTERVAL)

    assert tower.state(int(board.name)) is BoardState.DISCOVERED


async def test_a_deleted_board_is_forgotten(tower: Watchtower) -> None:
    number = await tower.come()
    tower.presence.bind("boards-plain", "ipv4:127.0.0.1:1", number)
    await tower.boards.delete(number, actor=BOSS)
    async with asyncio.timeout(60):
        while tower.presence.behind("boards-plain", "ipv4:127.0.0.1:1") is not None:
            await asyncio.sleep(0.002)

    with pytest.raises(NotFound):
        await tower.report(number)
    await tower.wait(4 * INTERVAL)


def test_no_more_connections_are_remembered_than_there_can_be() -> None:
    presence = BoardPresence()
    for index in range(CONNECTIONS_REMEMBERED + 10):
        presence.bind("boards-plain", f"ipv4:10.0.0.1:{index}", index)

    assert presence.behind("boards-plain", "ipv4:10.0.0.1:0") is None
    assert presence.behind("boards-plain", f"ipv4:10.0.0.1:{CONNECTIONS_REMEMBERED}") is not None
    assert presence.behind("boards", f"ipv4:10.0.0.1:{CONNECTIONS_REMEMBERED}") is None
