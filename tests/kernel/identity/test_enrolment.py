from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.shared.storekit import SCOPE, THING, Spec

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import FleetplaneError, NotFound, Unauthenticated
from fleetplane.kernel.identity import enrolment
from fleetplane.kernel.identity.enrolment import Redemption, digest, redeem
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

TOKEN = digest("a token")
DAY_NS = 86_400 * 10**9


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=(THING,), clock=clock) as opened:
        yield opened


async def enrol(store: Store, key: str, *, fails: bool = False, expires_at_ns: int = 0) -> Redemption:
    """What a caller does: check, redeem and record in one transaction."""

    def change(draft: Draft) -> Redemption:
        how = redeem(
            draft, purpose="test", token_digest=TOKEN, key_digest=digest(key), expires_at_ns=expires_at_ns
        )
        if how is Redemption.FIRST:
            draft.put(THING, SCOPE, key, spec=Spec(value=1))
        if fails:
            raise NotFound("something that the caller needed is gone")
        return how

    done = await store.transact(change, actor="t", action="enrol", touches=[THING.key(SCOPE, key)])
    return done.value


async def test_of_64_concurrent_redeemers_exactly_one_wins(store: Store) -> None:
    answers = await asyncio.gather(*(enrol(store, f"k{i}") for i in range(64)), return_exceptions=True)

    assert [a for a in answers if not isinstance(a, BaseException)] == [Redemption.FIRST]
    refused = [a for a in answers if isinstance(a, FleetplaneError)]
    assert len(refused) == 63
    assert all(isinstance(a, Unauthenticated) and "already used" in a.message for a in refused)
    assert len(store.list(THING)) == 1, "nobody else's record was made"


async def test_a_retry_with_the_same_key_succeeds_and_changes_nothing(store: Store) -> None:
    assert await enrol(store, "k") is Redemption.FIRST
    revision = store.revision

    assert await enrol(store, "k") is Redemption.RETRY
    assert store.revision == revision


async def test_concurrent_retries_with_one_key_are_one_first_and_many_retries(store: Store) -> None:
    answers = await asyncio.gather(*(enrol(store, "k") for _ in range(16)))

    assert sorted(answers) == [Redemption.FIRST] + [Redemption.RETRY] * 15


async def test_a_transaction_that_fails_leaves_the_token_unused(store: Store) -> None:
    with pytest.raises(NotFound):
        await enrol(store, "unlucky", fails=True)

    assert enrolment.redeemed_by(store, purpose="test", token_digest=TOKEN) is None
    assert await enrol(store, "other") is Redemption.FIRST


async def test_a_redeemed_token_stays_redeemed_after_a_restart(tmp_path: Path, clock: VirtualClock) -> None:
    settings = StoreSettings(path=tmp_path / "restart.db")
    async with Store.open(settings, kinds=(THING,), clock=clock) as store:
        await enrol(store, "first")
    async with Store.open(settings, kinds=(THING,), clock=clock) as store:
        with pytest.raises(Unauthenticated, match="already used"):
            await enrol(store, "second")
        assert await enrol(store, "first") is Redemption.RETRY
        assert enrolment.redeemed_by(store, purpose="test", token_digest=TOKEN) == digest("first")


async def test_purposes_are_kept_apart(store: Store) -> None:
    def change(draft: Draft) -> list[Redemption]:
        return [
            redeem(draft, purpose=purpose, token_digest=TOKEN, key_digest=digest(purpose))
            for purpose in ("agents", "operators")
        ]

    done = await store.transact(change, actor="t", action="t", touches=())
    assert done.value == [Redemption.FIRST, Redemption.FIRST]


async def test_a_released_token_may_be_used_by_another_key(store: Store) -> None:
    await enrol(store, "k")

    def forget(draft: Draft) -> list[bool]:
        return [enrolment.release(draft, purpose="test", token_digest=TOKEN) for _ in range(2)]

    done = await store.transact(forget, actor="t", action="t", touches=())
    assert done.value == [True, False]
    assert await enrol(store, "other") is Redemption.FIRST


async def test_a_sweep_forgets_only_what_expired_longer_ago_than_any_leeway(
    store: Store, clock: VirtualClock
) -> None:
    tokens = enrolment.SWEEP_BATCH + 10  # more than one transaction's worth

    def change(draft: Draft) -> None:
        for number in range(tokens):
            redeem(
                draft,
                purpose="test",
                token_digest=digest(str(number)),
                key_digest="k",
                expires_at_ns=clock.now_ns() + DAY_NS,
            )
        redeem(draft, purpose="test", token_digest=digest("kept"), key_digest="k")

    await store.transact(change, actor="t", action="t", touches=())
    await clock.advance(86_400 + enrolment.SWEEP_GRACE_SECONDS)
    assert await enrolment.sweep(store, clock) == 0
    await clock.advance(1)

    assert await enrolment.sweep(store, clock) == tokens
    assert enrolment.redeemed_by(store, purpose="test", token_digest=digest("kept")) == "k"
    assert store.statistics().claims == 1
    assert audit.verify([row async for row in store.audit()], store.audit_head()).intact


@pytest.mark.parametrize(("purpose", "key"), [("", "k"), ("p", ""), ("p", "a@b")])
async def test_a_redemption_without_purpose_or_key_is_refused(store: Store, purpose: str, key: str) -> None:
    with pytest.raises(FleetplaneError):
        await store.transact(
            lambda draft: redeem(draft, purpose=purpose, token_digest=TOKEN, key_digest=key),
            actor="t",
            action="t",
            touches=(),
        )


def test_text_and_its_bytes_have_one_digest() -> None:
    assert digest("ä") == digest("ä".encode())
    assert len(digest(b"")) == 64
