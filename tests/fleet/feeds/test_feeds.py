"""Two feeds, two promises: lossy with a count, resumable from any place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.shared.storekit import THING, opened, put

from fleetplane.fleet.feeds.mailbox import MAILBOX_LIMIT, Mailbox
from fleetplane.fleet.feeds.ring import UNKNOWN_PART, WHOLE, EventRing, Missed, RingRead
from fleetplane.kernel.events import Event


def test_a_full_mailbox_forgets_its_oldest_and_counts_them() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in range(MAILBOX_LIMIT + 3):
        mailbox.post(number)
    assert mailbox.bell.is_set()
    assert (mailbox.take(), mailbox.take_missed(), mailbox.take_missed()) == (3, 3, 0)
    assert len(mailbox) == MAILBOX_LIMIT - 1


def test_an_empty_mailbox_has_nothing_to_take() -> None:
    assert Mailbox[int]().take() is None


@dataclass(frozen=True, slots=True)
class Made:
    name: str
    revision: int
    part: int


def two_events(event: Event) -> Iterator[Made]:
    """Every change means two events."""
    for part in range(2):
        yield Made(event.resource.name, event.revision, part)


@pytest.mark.parametrize("ring_events", [100, 4])
async def test_a_reader_resumes_after_any_event_from_the_ring_or_from_history(
    tmp_path: Path, ring_events: int
) -> None:
    async with opened(tmp_path / "s.db") as store:
        ring: EventRing[Made] = EventRing(store, kinds=[THING], events_of=two_events, ring_events=ring_events)
        running = asyncio.create_task(ring.run())
        start = ring.revision
        revisions = [(await put(store, f"thing-{number}")).value.revision for number in range(5)]
        async with asyncio.timeout(60):
            bell = asyncio.Event()
            with ring.ringing(bell):
                while ring.revision < revisions[-1]:
                    bell.clear()
                    await bell.wait()
        expected = [(revision, part) for revision in revisions for part in range(2)]
        assert [
            (one.revision, one.part) async for one in ring.history((start, WHOLE), ring.revision)
        ] == expected
        for index, place in enumerate(expected):
            position = ring.position_after(place)
            if position is None:
                rest = [one async for one in ring.history(place, ring.revision)]
                assert ring_events == 4
            else:
                reading = ring.read(position, limit=100)
                assert isinstance(reading, RingRead)
                rest = list(reading.events)
            assert [(one.revision, one.part) for one in rest] == expected[index + 1 :]
        last = ring.position_after((revisions[-1], UNKNOWN_PART))
        assert last is not None
        again = ring.read(last, limit=100)
        assert isinstance(again, RingRead)
        assert len(again.events) == 2, "a revision alone repeats all of its events"
        if ring_events == 4:
            assert ring.read(0, limit=100) == Missed(revision=ring.revision, position=ring.position)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
