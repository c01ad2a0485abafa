"""Virtual time: it passes when told to, in order, and repeats with its seed."""

from __future__ import annotations

import asyncio

from fleetplane.kernel.clock import Clock
from fleetplane.sim.clock import EPOCH_NS, VirtualClock


def test_it_is_a_clock() -> None:
    clock: Clock = VirtualClock()
    assert clock.now_ns() == EPOCH_NS
    assert clock.monotonic() == 0.0


async def test_sleepers_wake_in_order_each_at_its_own_moment() -> None:
    clock = VirtualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.monotonic()))

    async with asyncio.TaskGroup() as tasks:
        for name, seconds in (("late", 3600.0), ("soon", 1.0), ("mid", 60.5), ("tie", 60.5)):
            tasks.create_task(sleeper(name, seconds))
        await clock.advance(100)
        assert woken == [("soon", 1.0), ("mid", 60.5), ("tie", 60.5)]
        assert (clock.monotonic(), clock.sleepers) == (100.0, 1)
        await clock.advance(3500)
    assert woken[-1] == ("late", 3600.0)
    assert clock.now_ns() == EPOCH_NS + 3600 * 10**9


async def test_one_who_wakes_and_sleeps_again_keeps_its_rhythm_within_one_advance() -> None:
    clock = VirtualClock()
    ticks: list[float] = []

    async def ticker() -> None:
        while True:
            await clock.sleep(10)
            ticks.append(clock.monotonic())

    task = asyncio.create_task(ticker())
    await clock.advance(35)
    assert ticks == [10.0, 20.0, 30.0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await clock.advance(35)
    assert ticks == [10.0, 20.0, 30.0]
    assert clock.sleepers == 0


async def test_no_time_is_slept_without_moving_the_clock() -> None:
    clock = VirtualClock()
    await clock.sleep(0)
    await clock.sleep(-1)
    assert clock.monotonic() == 0.0


def test_the_same_seed_gives_the_same_run() -> None:
    one, two, other = VirtualClock(seed=1), VirtualClock(seed=1), VirtualClock(seed=2)
    assert [one.random(), one.token_bytes(8)] == [two.random(), two.token_bytes(8)]
    assert one.token_bytes(8) != other.token_bytes(8)
