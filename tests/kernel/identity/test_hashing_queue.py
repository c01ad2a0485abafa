"""Who is hashed next: a flood of strangers takes a bounded part, and keeps nobody from signing in."""

from __future__ import annotations

import asyncio

import pytest
from support.shared.virtual_loop import run

from fleetplane.kernel.errors import ResourceExhausted
from fleetplane.kernel.identity.passwords import (
    KNOWN_WAITING,
    STRANGERS_REST,
    STRANGERS_WAITING,
    HashingQueue,
)

HASH_SECONDS = 0.1


class Logins:
    """Callers of a queue in virtual time, and what became of each."""

    def __init__(self) -> None:
        self.queue = HashingQueue()
        self.done: list[str] = []
        self.refused: list[str] = []

    async def log_in(self, name: str, stranger: str = "") -> None:
        try:
            async with self.queue.place(stranger):
                await asyncio.sleep(HASH_SECONDS)
        except ResourceExhausted as error:
            assert error.retry_after_seconds
            self.refused.append(name)
        else:
            self.done.append(name)

    def begin(self, tasks: asyncio.TaskGroup, name: str, stranger: str = "") -> asyncio.Task[None]:
        return tasks.create_task(self.log_in(name, stranger))


def networks(count: int) -> list[str]:
    return [f"198.{number // 250}.{number % 250}.1" for number in range(count)]


def test_a_flood_is_refused_before_it_is_hashed_and_known_addresses_do_not_wait_for_it() -> None:
    async def flood() -> None:
        logins = Logins()
        now = asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            for address in networks(400):
                logins.begin(tasks, address, address)
            await asyncio.sleep(0)
            assert len(logins.refused) == 400 - STRANGERS_WAITING - 1, "one is hashed, some wait"
            began = now()
            await logins.log_in("known")
            assert now() - began <= HASH_SECONDS * 1.01, "one place is no stranger's"
            await logins.begin(tasks, "another", "203.0.113.1")
            assert logins.done.index("known") < 2
        taken = now() - began
        assert taken >= (1 + STRANGERS_REST) * HASH_SECONDS * STRANGERS_WAITING * 0.99, "they rest in between"
        assert repr(logins.queue) == "<HashingQueue known=0 strangers=0>"

    run(flood())


def test_a_network_with_many_waiting_makes_room_for_another() -> None:
    async def crowd() -> None:
        logins = Logins()
        async with asyncio.TaskGroup() as tasks:
            for host in range(STRANGERS_WAITING + 20):
                logins.begin(tasks, f"bot {host}", f"198.51.100.{host}")
                logins.begin(tasks, f"site {host}", f"2001:db8:0:{host:x}::1")
            await asyncio.sleep(0)
            logins.begin(tasks, "ann", "203.0.113.9")
        assert logins.done.index("ann") <= 3, "it had the next turn after those of two networks"
        assert len(logins.done) == STRANGERS_WAITING + 1

    run(crowd())


def test_known_callers_are_bounded_too() -> None:
    async def crowd() -> None:
        logins = Logins()
        async with asyncio.TaskGroup() as tasks:
            for number in range(KNOWN_WAITING + 5):
                logins.begin(tasks, str(number))
        assert len(logins.refused) == 3, "two are being hashed"

    run(crowd())


@pytest.mark.parametrize("stranger", ["", "198.51.100.1"])
def test_callers_who_leave_leave_no_place_behind(stranger: str) -> None:
    async def leaving() -> None:
        logins = Logins()
        for turns in range(6):
            async with asyncio.TaskGroup() as tasks:
                coming = [logins.begin(tasks, "gone", stranger) for _ in range(4)]
                for _ in range(turns):
                    await asyncio.sleep(0)
                coming[0].cancel()
                for _ in range(turns):
                    await asyncio.sleep(0)
                for one in coming[1:]:
                    one.cancel()
            await asyncio.sleep(STRANGERS_REST)
        await asyncio.wait_for(logins.log_in("next", stranger), 1)
        assert logins.done == ["next"]

    run(leaving())


def test_who_waits_for_too_long_is_told_to_come_back() -> None:
    async def stuck() -> None:
        logins = Logins()
        async with logins.queue.place(), logins.queue.place():
            await logins.log_in("ann", "198.51.100.1")
        assert logins.refused == ["ann"]
        await logins.log_in("ann", "198.51.100.1")
        assert logins.done == ["ann"]

    run(stuck())
