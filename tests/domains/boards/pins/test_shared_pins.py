"""One pin that several servers write, read and reserve at once."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.boards.shared_boards import BOSS, Half, PinsRig, play
from support.shared.virtual_servers import until

from fleetplane.domains.boards.calls.errors import BoardSilent
from fleetplane.domains.boards.pins.kinds import GPIO_DEVICE, status_of
from fleetplane.domains.boards.pins.turns import PIN_TURN, TURN_SECONDS, WAIT_SECONDS, HeldUp, PinBusy
from fleetplane.kernel.errors import Conflict, FleetplaneError


async def _write(half: Half, number: int, level: int, who: str = "boss") -> FleetplaneError | None:
    try:
        await half.write(number, level, who)
    except FleetplaneError as error:
        return error
    return None


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_written_down_last_is_what_the_board_drives(seed: int) -> None:
    async def scene(rig: PinsRig) -> None:
        chance = random.Random(seed)
        halves = await rig.start()
        for _ in range(20):
            said = await asyncio.gather(
                *(_write(half, rig.number, chance.randint(0, 1), half.server.name) for half in halves)
            )
            assert said == [None, None, None]
            await rig.settled()
            device = halves[0].device(rig.number)
            assert device.spec.level == rig.wire.level
            assert status_of(device).applied_generation == device.generation
        assert len(rig.wire.done) >= 60
        assert rig.wire.refused == 0
        assert halves[0].server.store.count(PIN_TURN) == 0

    play(scene, seed=seed)


def test_an_order_that_comes_late_is_refused_by_the_board() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        a.lines.late_seconds = 20.0
        late = asyncio.create_task(_write(a, rig.number, 1, "late"))
        await until(lambda: b.server.store.count(PIN_TURN) == 1)
        began = _now()
        assert await _write(b, rig.number, 0, "next") is None
        assert _now() - began < TURN_SECONDS
        assert isinstance(await late, BoardSilent)
        await until(lambda: rig.wire.refused == 1)
        await rig.settled()
        assert (rig.wire.level, a.device(rig.number).spec.level) == (0, 0)
        assert [actor for actor, _ in rig.wire.done] == ["next"]

    play(scene)


def test_a_board_that_refuses_nothing_is_brought_back_to_what_it_should_be() -> None:
    """Agents of another kind, or an earlier version, do what comes; the controller sees to it."""

    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        assert await _write(a, rig.number, 0) is None
        b.lines.late_seconds = 3.0
        assert isinstance(await _write(b, rig.number, 1), BoardSilent)
        assert ("boss", 1) in rig.wire.done
        await until(lambda: rig.wire.level == 0)
        await until(lambda: status_of(a.device(rig.number)).reason == "")

    play(scene, controls=True, refuses_older=False)


def test_nobody_else_writes_once_a_reservation_was_acknowledged() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, c = await rig.start()
        for turn in range(10):
            holder = f"holder{turn}"
            writing = [asyncio.create_task(_write(half, rig.number, turn % 2, "rival")) for half in (a, c)]
            await b.reserve(rig.number, holder)
            before = len(rig.wire.done)
            assert all(
                error is None or isinstance(error, Conflict) for error in await asyncio.gather(*writing)
            )
            assert rig.wire.done[before:] == []
            assert isinstance(await _write(c, rig.number, 1, "rival"), Conflict)
            assert await _write(a, rig.number, 1, holder) is None
            with b.server.store.writing_here():
                await b.devices.release(rig.number, holder, actor=holder)
            await rig.settled()

    play(scene)


def test_a_server_that_dies_at_a_pin_keeps_others_out_for_a_moment_only() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, c = await rig.start()
        b.lines.stalls = True
        dying = asyncio.create_task(_write(b, rig.number, 1))
        await until(lambda: c.server.store.count(PIN_TURN) == 1)
        b.server.kill()
        began = _now()
        assert await _write(c, rig.number, 0) is None
        assert _now() - began < WAIT_SECONDS
        assert rig.wire.level == 0
        await rig.settled()
        assert a.device(rig.number).spec.level == 0
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)

    play(scene)


def test_a_board_that_stalls_costs_a_caller_a_bounded_time() -> None:
    async def scene(rig: PinsRig) -> None:
        halves = await rig.start()
        assert await _write(halves[0], rig.number, 1) is None
        for half in halves:
            half.lines.stalls = True
        began = _now()
        said = await asyncio.gather(*(_write(half, rig.number, 0) for half in halves))
        assert all(isinstance(error, BoardSilent | PinBusy) for error in said), said
        assert _now() - began < 2 * WAIT_SECONDS
        await rig.settled()
        device = halves[0].device(rig.number)
        # Nobody knows what the board made of it, and the record says so.
        assert (device.spec.level, status_of(device).applied_generation) == (1, 0)

    play(scene)


def test_a_server_that_was_stopped_after_its_decision_sends_nothing() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        store = b.server.store
        plain = store.transact

        async def held_up(*args: object, **more: object) -> object:
            done: object = await plain(*args, **more)  # type: ignore[arg-type]
            if more["action"] == "boards.gpio_turn":
                await asyncio.sleep(6.0)
            return done

        store.transact = held_up  # type: ignore[assignment, method-assign]
        assert isinstance(await _write(b, rig.number, 1), HeldUp)
        assert rig.wire.done == []
        assert await _write(a, rig.number, 0) is None

    play(scene)


def test_a_pin_that_is_deleted_while_another_server_writes_it_is_given_up() -> None:
    async def scene(rig: PinsRig) -> None:
        _, b, c = await rig.start()
        b.lines.slow_seconds = 4.0
        writing = asyncio.create_task(_write(b, rig.number, 1))
        await until(lambda: c.server.store.count(PIN_TURN) == 1)
        with c.server.store.writing_here():
            await c.devices.delete(rig.number, holder="boss", actor="boss")
        await writing
        await until(lambda: c.server.store.count(GPIO_DEVICE) == 0)
        assert rig.wire.level is None
        await until(lambda: c.server.store.count(PIN_TURN) == 0)

    play(scene, controls=True)


def test_the_controller_and_people_at_other_servers_come_to_the_same_level() -> None:
    async def scene(rig: PinsRig) -> None:
        halves = await rig.start()
        chance = random.Random(3)
        for _ in range(10):
            rig.wire.level = None  # the board was restarted
            halves[0].controller.came(halves[0].device(rig.number).spec.board)
            await asyncio.gather(*(_write(half, rig.number, chance.randint(0, 1)) for half in halves[1:]))
            await until(lambda: rig.wire.level == halves[0].device(rig.number).spec.level)
            await rig.settled()

    play(scene, controls=True)


def test_a_reading_that_another_servers_write_overtook_is_not_written_down() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        assert await _write(a, rig.number, 0) is None
        await rig.settled()
        read = b.driver._pins.read

        async def overtaken(*args: object, **more: object) -> object:
            found = await read(*args, **more)  # type: ignore[arg-type]
            assert await _write(a, rig.number, 1) is None
            return found

        b.driver._pins.read = overtaken  # type: ignore[assignment, method-assign]
        with b.server.store.writing_here():
            assert (await b.driver.read(rig.number, asked=BOSS)).level == 0
        await rig.settled()
        assert status_of(a.device(rig.number)).value == 1.0

    play(scene)


def test_of_many_callers_at_a_board_that_stalls_each_waits_a_bounded_time() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        a.lines.stalls = b.lines.stalls = True
        began = _now()
        said = await asyncio.gather(*(_write(half, rig.number, 1) for half in (a, b) for _ in range(10)))
        assert all(isinstance(error, BoardSilent | PinBusy) for error in said), said
        assert _now() - began < 2 * WAIT_SECONDS + TURN_SECONDS
        a.lines.stalls = False
        assert await _write(a, rig.number, 1) is None

    play(scene)


@pytest.mark.parametrize("level", [None, 0])
def test_an_order_still_on_its_way_is_refused_once_the_pin_was_reserved(
    level: int | None,
) -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        if level is not None:
            assert await _write(a, rig.number, level) is None
        a.lines.late_seconds = 20.0
        assert isinstance(await _write(a, rig.number, 1, "late"), BoardSilent)
        await rig.settled()
        await b.reserve(rig.number, "holder")
        await until(lambda: rig.wire.refused == 1)
        assert rig.wire.level == level
        assert not status_of(b.device(rig.number)).doubted

    play(scene)


def test_what_a_server_sent_before_it_died_is_taken_back() -> None:
    async def scene(rig: PinsRig) -> None:
        a, b, _ = await rig.start()
        b.lines.late_seconds = 2.0
        dying = asyncio.create_task(_write(b, rig.number, 1))
        await until(lambda: a.server.store.count(PIN_TURN) == 1)
        b.server.kill()
        began = _now()
        await until(lambda: rig.wire.done)
        assert rig.wire.level == 1
        await until(lambda: rig.wire.level is None)
        assert _now() - began < 2 * TURN_SECONDS
        await until(lambda: not status_of(a.device(rig.number)).doubted)
        assert (a.server.store.count(PIN_TURN), a.device(rig.number).spec.level) == (0, None)
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)

    play(scene, controls=True)
