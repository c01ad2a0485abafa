"""The feed of one run: numbers, pieces of output, and what is dropped."""

from __future__ import annotations

import asyncio

from fleetplane.fleet.runs.events import RunEnded, RunEvent, Started, TargetOutput
from fleetplane.fleet.runs.feed import BYTES_LIMIT, EVENTS_LIMIT, GATHERED_BYTES, RunFeed
from fleetplane.fleet.runs.records import RunState, Summary


async def test_lines_are_told_in_pieces_and_none_is_lost() -> None:
    feed = RunFeed()
    lines = [b"line %d\n" % number for number in range(2 * EVENTS_LIMIT)]
    for text in lines:
        feed.add_output("a", "stdout", text)
    feed.add_output("b", "stdout", b"other\n")
    feed.end()
    events = [event async for event in feed.after() if event is not None]
    told = b"".join(event.output for event in events if isinstance(event, TargetOutput) and event.name == "a")
    assert told == b"".join(lines)
    assert len(events) <= len(told) // GATHERED_BYTES + 2
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    (half,) = [event async for event in feed.after(events[-2].number) if event is not None]
    assert isinstance(half, TargetOutput)
    assert half.output == b"other\n"


async def test_a_reader_takes_what_has_come_without_waiting_for_more() -> None:
    feed = RunFeed()
    reader = feed.after()
    feed.add_output("a", "stdout", b"one\n")
    first = await anext(reader)
    assert isinstance(first, TargetOutput)
    assert first.output == b"one\n"
    waiting = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0)
    feed.add_output("a", "stdout", b"two\n")
    feed.add_output("a", "stdout", b"three\n")
    second = await waiting
    assert isinstance(second, TargetOutput)
    assert second.output == b"two\nthree\n"


async def test_a_reader_that_needs_what_is_gone_is_told_so_and_goes_on() -> None:
    feed = RunFeed("e1")
    feed.add(Started(targets=2, skipped=0))
    for number in range(3 * BYTES_LIMIT // GATHERED_BYTES):
        feed.add_output("a" if number % 2 else "b", "stdout", bytes(GATHERED_BYTES))
    feed.add(RunEnded(summary=Summary(ok=2), state=RunState.COMPLETE))
    feed.end()
    told: list[RunEvent | None] = [event async for event in feed.after()]
    assert told[0] is None, "the oldest output is gone, and the reader knows"
    assert isinstance(told[-1], RunEnded)
    assert sum(event.size for event in told if event is not None) <= BYTES_LIMIT
    assert told[-1].mark.startswith("e1-")


async def test_nothing_is_added_after_the_end() -> None:
    feed = RunFeed()
    feed.end()
    feed.add(Started(targets=1, skipped=0))
    feed.add_output("a", "stdout", b"late")
    assert [event async for event in feed.after()] == []
