"""The way from the event loop to a thread that owns hardware."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fleetplane.domains.boards.agent.gpio.chip import HardwareOverloaded, HardwareSilent
from fleetplane.domains.boards.agent.gpio.hardware_thread import HardwareThread
from fleetplane.kernel.errors import NotFound, Unavailable


async def test_calls_run_in_order_on_one_thread_and_pass_on_what_they_raise() -> None:
    thread = HardwareThread("test")
    names = await asyncio.gather(*(thread.call(threading.get_ident) for _ in range(50)))
    assert len(set(names)) == 1
    assert names[0] != threading.get_ident()

    def refuse() -> None:
        raise NotFound("no")

    with pytest.raises(NotFound):
        await thread.call(refuse)
    assert await thread.call(lambda: 7) == 7
    await thread.close()


async def test_the_loop_goes_on_while_the_hardware_hangs() -> None:
    thread, free = HardwareThread("test", call_seconds=60), threading.Event()
    hanging = asyncio.create_task(thread.call(free.wait))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not hanging.done()
    free.set()
    assert await hanging
    await thread.close()


async def test_a_call_that_was_given_up_before_it_began_never_happens() -> None:
    thread, free, begun = HardwareThread("test", call_seconds=60), threading.Event(), threading.Event()
    done: list[str] = []

    def hang() -> None:
        begun.set()
        free.wait()

    hanging = asyncio.create_task(thread.call(hang))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    thread._call_seconds = 0.05
    with pytest.raises(HardwareSilent):
        await thread.call(lambda: done.append("too late"))
    cancelled = asyncio.create_task(thread.call(lambda: done.append("cancelled")))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    thread._call_seconds = 60.0
    free.set()
    await hanging
    await thread.call(lambda: done.append("in time"))
    assert done == ["in time"]
    await thread.close()


async def test_what_waits_is_bounded() -> None:
    thread, free, begun = HardwareThread("test", waiting_limit=3), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        free.wait()

    first = asyncio.create_task(thread.call(hang))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    waiting = [asyncio.create_task(thread.call(lambda: 1)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(HardwareOverloaded):
        await thread.call(lambda: 1)
    free.set()
    await asyncio.gather(first, *waiting)
    await thread.close()


async def test_a_closed_thread_takes_nothing_more_and_closing_twice_is_harmless() -> None:
    thread = HardwareThread("test")
    await thread.call(lambda: 1)
    await thread.close()
    await thread.close()
    with pytest.raises(Unavailable):
        await thread.call(lambda: 1)


async def test_the_last_call_happens_even_if_whoever_closes_is_hurried() -> None:
    thread, free, done = HardwareThread("test"), threading.Event(), threading.Event()
    waiting = asyncio.create_task(thread.call(free.wait))
    await asyncio.sleep(0)
    closing = asyncio.create_task(thread.close(done.set))
    await asyncio.sleep(0.01)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert not done.is_set()
    free.set()
    assert await asyncio.to_thread(done.wait, 60)
    await waiting


async def test_what_the_last_call_raises_is_not_lost() -> None:
    def refuse() -> None:
        raise NotFound("no")

    with pytest.raises(NotFound):
        await HardwareThread("test").close(refuse)
