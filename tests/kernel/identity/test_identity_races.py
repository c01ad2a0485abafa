"""What is in memory is what is in the store, also if whoever changed it left, or two did at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from support.kernel.leaving import leave_while_written

from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import AlreadyExists, Unauthenticated
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.roots import SuccessionPhase
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.identity.tokens import OneTimeTokens
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

CLOCK = VirtualClock()
MASTER = MasterKey(bytes(32), CLOCK)
ROLES = frozenset({Role("edge.admin")})


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=CLOCK) as store:
        yield store


async def tokens_of(store: Store) -> OneTimeTokens:
    tokens = OneTimeTokens(store, MASTER, CLOCK)
    await tokens.load()
    return tokens


async def test_a_token_is_refused_although_whoever_revoked_it_left(store: Store) -> None:
    tokens = await tokens_of(store)
    token = await tokens.create("ci", roles=ROLES, actor="local")
    await leave_while_written(store, tokens.revoke("ci", actor="local"))
    assert len(await tokens_of(store)) == 0
    with pytest.raises(Unauthenticated):
        tokens.authenticate(token)


async def test_a_token_that_nobody_waited_for_can_be_revoked(store: Store) -> None:
    tokens = await tokens_of(store)
    await leave_while_written(store, tokens.create("ci", roles=ROLES, actor="local"))
    assert [one.name for one in (await tokens_of(store)).records()] == ["ci"]
    assert await tokens.revoke("ci", actor="local")
    assert len(await tokens_of(store)) == 0


async def test_two_who_revoke_one_token_at_once_both_succeed(store: Store) -> None:
    tokens = await tokens_of(store)
    await tokens.create("ci", roles=ROLES, actor="local")
    await asyncio.gather(tokens.revoke("ci", actor="a"), tokens.revoke("ci", actor="b"))
    assert len(tokens) == 0


async def test_of_two_tokens_of_one_name_that_are_made_at_once_there_is_one(store: Store) -> None:
    tokens = await tokens_of(store)
    making: list[Awaitable[str]] = [tokens.create("ci", roles=ROLES, actor="local") for _ in range(2)]
    made = await asyncio.gather(*making, return_exceptions=True)
    assert [type(one) for one in made] == [str, AlreadyExists]
    assert await tokens.revoke("ci", actor="local")
    with pytest.raises(Unauthenticated):
        tokens.authenticate(str(made[0]))


async def test_nobody_goes_on_with_a_revoked_token_while_another_reads_that_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    active, standing_by = await tokens_of(store), OneTimeTokens(store, MASTER, CLOCK)
    token = await active.create("ci", roles=ROLES, actor="local")
    await standing_by.load()
    await active.revoke("ci", actor="local")
    standing_by.secret_changed("token/ci")
    names, reading, go_on = store.secret_names, asyncio.Event(), asyncio.Event()

    async def slowly(prefix: str) -> Any:
        reading.set()
        await go_on.wait()
        return await names(prefix)

    monkeypatch.setattr(store, "secret_names", slowly)

    async def second() -> None:
        await reading.wait()
        asyncio.get_running_loop().call_soon(go_on.set)
        await standing_by.refresh()
        with pytest.raises(Unauthenticated):
            standing_by.authenticate(token)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(standing_by.refresh())
        tasks.create_task(second())


async def test_an_authority_takes_a_step_although_whoever_wanted_it_left(store: Store) -> None:
    authority = await Authority.load_or_create(store, MASTER, CLOCK)
    told: list[SuccessionPhase] = []
    authority.subscribe(lambda: told.append(authority.phase))
    await leave_while_written(store, authority.announce(actor="ada"))
    kept = await Authority.load_or_create(store, MASTER, CLOCK)
    assert kept.phase is authority.phase is SuccessionPhase.ANNOUNCED
    assert kept.trust_id == authority.trust_id
    assert told == [SuccessionPhase.ANNOUNCED]


async def test_a_key_signs_although_whoever_wanted_another_left(store: Store) -> None:
    async def loaded() -> SigningKeys:
        return await SigningKeys.load_or_create(store, MASTER, CLOCK, purpose="test", algorithm="EdDSA")

    keys = await loaded()
    await leave_while_written(store, keys.rotate(actor="ada"))
    assert keys.kid == (await loaded()).kid
