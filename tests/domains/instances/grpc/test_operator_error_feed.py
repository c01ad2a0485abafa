from __future__ import annotations

import asyncio

from fleetplane.domains.instances.live.errors import REMEMBERED_LIMIT, TEXT_LIMIT, ErrorFeed, ErrorListener
from fleetplane.sim.clock import VirtualClock


async def texts(listening: ErrorListener, count: int) -> list[str]:
    async with asyncio.timeout(60):
        return [(await anext(listening)).text for _ in range(count)]


async def test_an_error_is_told_once_within_the_window_and_again_after_it() -> None:
    clock = VirtualClock()
    feed = ErrorFeed(clock, window_seconds=10)
    with feed.subscribe("acme") as listening:
        feed.tell("acme", "web", "", "full")
        await clock.advance(9)
        feed.tell("acme", "web", "", "full")
        feed.tell("acme", "api", "", "full")
        await clock.advance(1)
        feed.tell("acme", "web", "", "full")
        feed.tell("acme", "web", "", "last")
        assert await texts(listening, 4) == ["full", "full", "full", "last"]
    assert (feed.told, feed.repeated) == (4, 1)


async def test_a_slow_listener_loses_the_oldest_and_learns_how_many() -> None:
    feed = ErrorFeed(VirtualClock(), queue_limit=3)
    with feed.subscribe("acme") as slow, feed.subscribe("acme") as quick:
        for number in range(5):
            feed.tell("acme", "", "", str(number))
            assert await texts(quick, 1) == [str(number)]
        assert (slow.take_lost(), quick.take_lost(), feed.dropped) == (2, 0, 2)
        assert slow.take_lost() == 0
        assert await texts(slow, 3) == ["2", "3", "4"]


async def test_what_is_remembered_is_bounded() -> None:
    feed = ErrorFeed(VirtualClock())
    for number in range(REMEMBERED_LIMIT + 1):
        feed.tell("acme", "", "", str(number))
    feed.tell("acme", "", "", "0")  # forgotten, so told again
    assert feed.repeated == 0
    feed.tell("acme", "", "", str(REMEMBERED_LIMIT))
    assert feed.repeated == 1


async def test_long_texts_are_cut() -> None:
    feed = ErrorFeed(VirtualClock())
    with feed.subscribe("acme") as listening:
        feed.tell("acme", "", "", "x" * 5000)
        assert [len(text) for text in await texts(listening, 1)] == [TEXT_LIMIT]


async def test_closing_ends_every_listener_after_what_it_was_told() -> None:
    feed = ErrorFeed(VirtualClock())
    listening = feed.subscribe("acme")
    feed.tell("acme", "", "", "one")
    feed.close()
    feed.tell("acme", "", "", "two")
    assert [trouble.text async for trouble in listening] == ["one"]


async def test_a_listener_that_left_costs_nothing() -> None:
    feed = ErrorFeed(VirtualClock())
    with feed.subscribe("acme"):
        assert "listeners=1" in repr(feed)
    assert "listeners=0" in repr(feed)
