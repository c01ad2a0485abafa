"""What was made for a place that is no more has ended; what was made before or after has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity import MasterKey, OneTimeTokens
from fleetplane.kernel.identity.bindings import (
    ENDED_PLACE,
    LIVES_LIMIT,
    SCOPE,
    end_life,
    ended_key,
    has_ended,
)
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

PATH, DAY = "/tenants/acme", 86_400.0


async def test_a_token_ends_with_the_place_that_it_was_made_for_and_is_swept(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=clock) as store:
        tokens = OneTimeTokens(store, MasterKey(bytes(32), clock), clock)

        async def token(name: str, scope: str) -> str:
            await clock.advance(1.0)
            return await tokens.create(name, roles=frozenset({Role("viewer")}), scope=scope, actor="test")

        async def end(path: str, since_ns: int) -> None:
            await clock.advance(1.0)
            await store.transact(
                lambda draft: end_life(draft, path, since_ns=since_ns),
                actor="test",
                action="test",
                touches=[ended_key(path)],
            )

        before = await token("before", "tenant/acme")
        await clock.advance(1.0)
        founded = clock.now_ns()
        during = await token("during", "tenant/acme")
        below = await token("below", "tenant/acme/workspace/prod")
        others = [await token("other", "tenant/acme-two"), await token("everywhere", "")]
        await end(PATH, founded)
        after = await token("after", "tenant/acme")
        for one in (during, below):
            with pytest.raises(Unauthenticated):
                tokens.authenticate(one)
        for one in (before, after, *others):
            tokens.authenticate(one)

        assert sorted(await tokens.sweep(actor="test")) == ["below", "during"]
        assert len(store.list(ENDED_PLACE)) == 1, "a token may be on its way"
        await clock.advance(DAY + 1)
        assert await tokens.sweep(actor="test") == []
        assert not store.list(ENDED_PLACE)
        for one in (before, after, *others):
            tokens.authenticate(one)


async def test_many_lives_of_one_path_are_kept_in_few_words(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=clock) as store:
        begun: list[int] = []

        def change(draft: Draft) -> None:
            end_life(draft, PATH, since_ns=begun[-1])

        given_between = 0
        for number in range(LIVES_LIMIT + 3):
            if number == 1:
                await clock.advance(10.0)
                given_between = clock.now_ns()
            await clock.advance(10.0)
            begun.append(clock.now_ns())
            await clock.advance(10.0)
            await store.transact(change, actor="test", action="test", touches=[ended_key(PATH)])
        found = store.get(ENDED_PLACE, SCOPE, ended_key(PATH).name)
        assert found is not None
        assert len(found.spec.lives) == LIVES_LIMIT
        assert all(has_ended(store, "tenant/acme", at) for at in begun)
        assert not has_ended(store, "tenant/acme", given_between), "nobody was called so for longest"
        assert not has_ended(store, "tenant/acme", begun[-1] - 1)


async def test_a_session_ends_with_the_place_that_it_was_opened_for(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=clock) as store:
        operators = await Operators.load(store, MasterKey(bytes(32), clock), clock)
        await operators.offer_sessions()

        def session() -> str:
            return operators.session("me", roles={Role("viewer")}, scope="tenant/acme", life_seconds=3600)

        before = session()
        await clock.advance(10.0)
        founded = clock.now_ns()
        during = session()
        await clock.advance(10.0)
        await store.transact(
            lambda draft: end_life(draft, PATH, since_ns=founded),
            actor="test",
            action="test",
            touches=[ended_key(PATH)],
        )
        await clock.advance(10.0)
        for one in (before, session()):
            operators.authenticate(one)
        with pytest.raises(Unauthenticated, match="ended with the tenant"):
            operators.authenticate(during)
