"""Numbers and limits of boards where several servers give them out at the same time."""

from __future__ import annotations

import asyncio

import pytest
from support.shared import virtual_loop
from support.shared.virtual_servers import virtual_servers

from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.numbers import BLOCK, Numbers
from fleetplane.domains.boards.kinds import COUNTER, KINDS, NUMBER_LIMIT, SCOPE, Counter, number_of
from fleetplane.domains.boards.rules import BoardFacts
from fleetplane.kernel.errors import AlreadyExists, ResourceExhausted
from fleetplane.kernel.store import Store


def test_no_two_servers_give_out_the_same_number() -> None:
    async def scene() -> None:
        async with virtual_servers(KINDS) as servers:
            stores = [(await servers.start(name)).store for name in "abc"]
            numbers = [Numbers(store, "board") for store in stores]
            taken = await asyncio.gather(*(one.take() for one in numbers for _ in range(2 * BLOCK + 1)))
            assert len(set(taken)) == len(taken)
            assert set(taken) <= set(range(1, 9 * BLOCK + 1))
            # A server that begins anew leaves a gap, and takes none again.
            assert await Numbers(stores[0], "board").take() > max(taken)
            assert await Numbers(stores[0], "cluster").take() == 1

    virtual_loop.run(scene())


def test_a_block_ends_where_numbers_do() -> None:
    async def scene() -> None:
        async with virtual_servers(KINDS) as servers:
            store = (await servers.start("a")).store
            await store.transact(
                lambda draft: draft.put(COUNTER, SCOPE, "board", spec=Counter(last=NUMBER_LIMIT - 2)),
                actor="test",
                action="test",
                touches=[COUNTER.key(SCOPE, "board")],
            )
            numbers = Numbers(store, "board")
            assert [await numbers.take(), await numbers.take()] == [NUMBER_LIMIT - 1, NUMBER_LIMIT]
            with pytest.raises(ResourceExhausted):
                await numbers.take()

    virtual_loop.run(scene())


def test_one_name_is_that_of_one_board_and_every_board_has_its_number() -> None:
    async def create(store: Store, name: str) -> int | None:
        try:
            board = await Boards(store).create(BoardFacts(name=name), actor="test")
        except AlreadyExists:
            return None
        return number_of(board)

    async def scene() -> None:
        async with virtual_servers(KINDS) as servers:
            stores = [(await servers.start(name)).store for name in "abc"]
            names = [f"board{n}" for n in range(20)]
            made = await asyncio.gather(*(create(store, name) for name in names for store in stores))
            numbers = [number for number in made if number is not None]
            assert len(numbers) == len(set(numbers)) == len(names)

    virtual_loop.run(scene())
