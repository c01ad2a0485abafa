"""What the server must hear: in order, bounded, until it is confirmed."""

from __future__ import annotations

import asyncio

from fleetplane.node.outbox import Outbox


async def test_reports_wait_in_order_and_the_oldest_go() -> None:
    box: Outbox[int, str] = Outbox(limit=3)
    for number in range(5):
        box.put(number, f"report {number}")
    assert (len(box), box.dropped) == (3, 2)
    key, report = await box.oldest()
    assert (key, report) == (2, "report 2")
    box.put(5, "report 5")  # while it was on its way, it had to go
    assert box.confirmed(key) is None
    assert (await box.oldest())[0] == 3
    assert box.dropped == 3


async def test_the_oldest_is_waited_for() -> None:
    box: Outbox[int, str] = Outbox(limit=3)
    box.put(1, "gone")
    assert box.confirmed(1) == "gone"
    waiting = asyncio.create_task(box.oldest())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.put(2, "here")
    assert await asyncio.wait_for(waiting, 60) == (2, "here")


def test_everything_goes_out_once_on_each_stream_and_stays_until_confirmed() -> None:
    box: Outbox[str, bytes] = Outbox(limit=10)
    box.put("a", b"1")
    box.put("b", b"2")
    for _ in range(2):
        box.new_stream()
        assert [key for key, _ in box.unsent()] == ["a", "b"]
        for key, value in box.unsent():
            box.sent(key, value)
        assert box.unsent() == []
    assert box.confirmed("a") == b"1"
    assert box.confirmed("a") is None
    box.new_stream()
    assert box.unsent() == [("b", b"2")]


def test_a_value_that_is_replaced_goes_out_again_at_its_new_place() -> None:
    box: Outbox[str, bytes] = Outbox(limit=10)
    box.put("a", old := b"old value")
    box.put("b", b"2")
    box.put("a", b"new value")
    box.sent("a", old)  # was on its way while it was replaced
    assert box.unsent() == [("b", b"2"), ("a", b"new value")]
    assert box.dropped == 0


async def test_what_the_server_could_not_take_goes_out_again_when_woken() -> None:
    box: Outbox[str, bytes] = Outbox(limit=10)
    box.put("a", value := b"1")
    await box.changed()
    assert not box.again("a"), "it has not gone out yet"
    box.sent("a", value)
    assert box.again("a")
    assert not box.again("absent")
    assert box.unsent() == [("a", value)]
    waiting = asyncio.create_task(box.changed())
    await asyncio.sleep(0)
    assert not waiting.done()
    box.wake()
    await asyncio.wait_for(waiting, 60)


def test_what_went_out_long_enough_ago_is_found() -> None:
    box: Outbox[str, bytes] = Outbox(limit=10)
    for number, key in enumerate("abc"):
        box.put(key, value := key.encode())
        if key != "c":
            box.sent(key, value, at=float(number))
    assert box.sent_before(0.0) == ["a"]
    assert box.sent_before(9.0) == ["a", "b"]
