"""One enrolment token at several servers that share a database: one machine gets in."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from support.shared.run_twice import run_twice
from support.shared.three_stores import three_stores
from support.shared.virtual_loop import run

from fleetplane.domains.boards.joining import join_tokens
from fleetplane.domains.boards.joining.join_tokens import JoinTokens
from fleetplane.domains.boards.kinds import SCOPE
from fleetplane.domains.boards.server import BLUEPRINT as BOARDS
from fleetplane.domains.instances.kinds import NONCE
from fleetplane.domains.instances.records.operators import record_nonce
from fleetplane.domains.instances.server import BLUEPRINT as INSTANCES
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.enrolment import REDEMPTION, Redemption, digest, redeem, sweep
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Draft, Store

ROUNDS = int(os.environ.get("CONTESTED_TOKENS", "60"))
"""A short form of a thousand."""
Change = Callable[[Draft], object]
KINDS = (*KERNEL_KINDS, *BOARDS.kinds, *INSTANCES.kinds)


async def _used(store: Store, change: Change) -> object:
    """What a transaction of an enrolment answers at one server, or how it is refused."""
    await store.confirmed()
    try:
        with store.writing_here():
            done = await store.transact(change, actor="machine", action="enrol", touches=())
    except Unauthenticated as error:
        return error.details["cause"]
    return done.value


def _redeeming(token: str, key: str, ends_at_ns: int = 0) -> Change:
    def change(draft: Draft) -> Redemption:
        return redeem(
            draft, purpose="t", token_digest=digest(token), key_digest=digest(key), expires_at_ns=ends_at_ns
        )

    return change


async def _at_once(stores: Sequence[Store], changes: Sequence[Change]) -> list[object]:
    pairs = zip(stores, changes, strict=True)
    return list(await asyncio.gather(*(_used(store, change) for store, change in pairs)))


def test_of_three_keys_that_show_one_token_to_three_servers_at_once_one_gets_in() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            for number in range(ROUNDS):
                token, keys = f"token {number}", [f"{number} {one}" for one in range(3)]
                told = await _at_once(stores, [_redeeming(token, key) for key in keys])
                assert sorted(map(str, told)) == ["first", "redeemed", "redeemed"], told
                winner = keys[told.index(Redemption.FIRST)]
                again = await _at_once(stores, [_redeeming(token, winner)] * 3)
                assert again == [Redemption.RETRY] * 3, "whoever lost the answer asks anywhere"

    run(race())


def test_a_key_that_asks_three_servers_at_once_is_one_machine() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            for number in range(ROUNDS // 3):
                told = await _at_once(stores, [_redeeming(f"token {number}", "key")] * 3)
                assert sorted(map(str, told)) == ["first", "retry", "retry"], told

    run(race())


def test_a_redemption_is_forgotten_by_the_database_s_clock_and_not_early() -> None:
    """The machine of the second server is an hour ahead: its sweep must not make a token good again."""

    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            ends = stores[0].clock.now_ns() + 10**9
            assert await _used(stores[0], _redeeming("token", "key", ends)) is Redemption.FIRST
            await asyncio.sleep(60)
            await stores[1].confirmed()
            with stores[1].writing_here():
                assert await sweep(stores[1], stores[1].clock) == 0
            assert await _used(stores[2], _redeeming("token", "another", ends)) == "redeemed"
            assert len(stores[2].claims(REDEMPTION)) == 1

    run(race())


def test_a_join_token_of_boards_is_good_for_one_board_at_whichever_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def race() -> None:
        async with three_stores(KINDS) as stores:
            store = stores[0]
            authority = await Authority.load_or_create(store, MasterKey(bytes(32), store.clock), store.clock)
            for number in range(ROUNDS // 3):
                made = await JoinTokens(store, authority, store.clock).create(actor="t")
                name = made.token.name

                def using(key: str, name: str = name) -> Change:
                    return partial(_joined, name=name, key=key)

                told = await _at_once(stores, [using(f"{number} {one}") for one in range(3)])
                assert sorted(map(str, told)) == [SCOPE, "redeemed", "redeemed"], told

    with run_twice(monkeypatch):
        run(race())


def _joined(draft: Draft, *, name: str, key: str) -> str:
    return join_tokens.use(draft, name, key_digest=digest(key)).scope


def test_nonces_of_operators_are_recorded_at_three_servers_at_once() -> None:
    """Each of them forgets those that have run out, whoever made them."""

    async def recorded(store: Store, name: str) -> None:
        await store.confirmed()
        with store.writing_here():
            await record_nonce(store, "default", name, life_seconds=5.0, actor="t")

    async def race() -> None:
        async with three_stores(KINDS) as stores:
            for number in range(5):
                await asyncio.gather(*(recorded(store, f"n{number}{at}") for at, store in enumerate(stores)))
                await asyncio.sleep(6)
            await stores[0].confirmed()
            assert sorted(one.name for one in stores[0].list(NONCE)) == ["n40", "n41", "n42"]

    run(race())
