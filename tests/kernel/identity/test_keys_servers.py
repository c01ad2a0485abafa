"""Keys and tokens of an installation that several servers share: made by one, followed by all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
from support.shared.run_twice import run_twice
from support.shared.three_stores import three_stores
from support.shared.virtual_loop import run

from fleetplane.fleet.people.refresh_tokens import RotatingRefresh
from fleetplane.fleet.releases.records import ReleaseKey
from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import AlreadyExists, Conflict, FailedPrecondition, Unauthenticated, Unavailable
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.master_key import ReplacedMeanwhile, SealedSecret, Unsealed
from fleetplane.kernel.identity.roots import SuccessionPhase
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.identity.tokens import TOKEN_NAME, OneTimeTokens
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store

T = TypeVar("T")
U = TypeVar("U")
ADMIN = frozenset({Role("admin")})
ROUNDS = 20


def _master(store: Store) -> MasterKey:
    return MasterKey(bytes(32), store.clock)


async def _here(store: Store, work: Callable[[], Awaitable[T]]) -> T:
    """As a call does it that may write on every server."""
    await store.confirmed()
    await store.refreshed()
    with store.writing_here():
        return await work()


async def _outcome(store: Store, work: Callable[[], Awaitable[T]]) -> T | Exception:
    try:
        return await _here(store, work)
    except Exception as error:
        return error


async def _signing(store: Store) -> SigningKeys:
    return await SigningKeys.load_or_create(
        store, _master(store), store.clock, purpose="test", algorithm="EdDSA", longest_life_seconds=3600
    )


async def _authority(store: Store) -> Authority:
    return await Authority.load_or_create(store, _master(store), store.clock)


async def _all(stores: Sequence[Store], make: Callable[[Store], Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*(_here(store, partial(make, store)) for store in stores)))


async def _at_once(
    stores: Sequence[Store], things: Sequence[U], act: Callable[[U], Awaitable[T]]
) -> list[T | Exception]:
    """What becomes of it where every server does it at once."""
    pairs = zip(stores, things, strict=True)
    return list(await asyncio.gather(*(_outcome(store, partial(act, thing)) for store, thing in pairs)))


async def _fresh(stores: Sequence[Store]) -> None:
    for store in stores:
        await store.confirmed()
        await store.refreshed()


async def _replaced(one: tuple[SealedSecret, bytes], *, version: str) -> Unsealed:
    kept, content = one
    return await kept.replace(content, version=version, actor="t")


async def _step(authority: Authority, *, step: str) -> None:
    await getattr(authority, step)(actor="t")


async def _created(tokens: OneTimeTokens, *, name: str) -> str:
    return await tokens.create(name, roles=ADMIN, actor="t")


async def _revoked(tokens: OneTimeTokens, *, name: str) -> bool:
    return await tokens.revoke(name, actor="t")


MADE: dict[str, Callable[[Store], Coroutine[Any, Any, object]]] = {}


def _made(name: str) -> Callable[[Callable[[Store], Coroutine[Any, Any, object]]], None]:
    def keep(make: Callable[[Store], Coroutine[Any, Any, object]]) -> None:
        MADE[name] = make

    return keep


@_made("authority")
async def _(store: Store) -> object:
    return (await _authority(store)).certificate_pem


@_made("workload authority")
async def _(store: Store) -> object:
    found = await Authority.load_or_create(store, _master(store), store.clock, purpose=WORKLOAD)
    return found.certificate_pem


@_made("signing keys")
async def _(store: Store) -> object:
    return (await _signing(store)).jwks()


@_made("release key")
async def _(store: Store) -> object:
    return (await ReleaseKey.load_or_create(store, _master(store))).text


@_made("refresh key")
async def _(store: Store) -> object:
    made = await RotatingRefresh.load_or_create(store, _master(store), store.clock, secret="people/test")
    return made.issue("0" * 32, 1, {})


@pytest.mark.parametrize("what", MADE)
def test_at_the_first_start_of_three_servers_at_once_one_makes_what_all_have(what: str) -> None:
    async def start() -> None:
        for seed in range(5):
            async with three_stores(KERNEL_KINDS, seed=seed) as stores:
                found = await _all(stores, MADE[what])
                assert found[0] == found[1] == found[2]
                assert [await MADE[what](store) for store in stores] == found

    run(start())


def test_a_server_that_stands_by_makes_nothing_and_loads_what_the_active_one_made() -> None:
    async def start() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            for make in MADE.values():
                with pytest.raises(Unavailable):
                    await make(stores[1])
                made = await make(stores[0])
                await stores[1].confirmed()
                assert await make(stores[1]) == made

    run(start())


def test_of_two_servers_that_replace_one_secret_at_once_one_does() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            kept = [SealedSecret(store, _master(store), name="one") for store in stores]

            async def made() -> bytes:
                return b"first"

            found = await _here(stores[1], lambda: kept[1].read_or_make(made, actor="t"))
            for number in range(ROUNDS):
                contents = [f"{number} of {index}".encode() for index in range(3)]
                outcomes = await _at_once(
                    stores,
                    list(zip(kept, contents, strict=True)),
                    partial(_replaced, version=found.version),
                )
                won = [one for one in outcomes if not isinstance(one, Exception)]
                assert len(won) == 1, outcomes
                assert all(isinstance(one, ReplacedMeanwhile) for one in outcomes if one is not won[0])
                await _fresh(stores)
                assert {await one.read() for one in kept} == {won[0]}
                found = won[0]

    run(race())


def test_a_step_of_the_authority_is_taken_by_one_server_and_known_to_all() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            authorities = await _all(stores, _authority)
            for number in range(ROUNDS):
                step = ("announce", "switch", "retire")[number % 3]
                outcomes = await _at_once(stores, authorities, partial(_step, step=step))
                assert [one for one in outcomes if one is None] == [None], outcomes
                refused = [one for one in outcomes if one is not None]
                assert all(isinstance(one, Conflict | FailedPrecondition) for one in refused), refused
                await _fresh(stores)
                assert len({one.trust_pem for one in authorities}) == 1
                assert len({one.certificate_pem for one in authorities}) == 1
                again = [await _authority(store) for store in stores]
                assert {one.trust_pem for one in again} == {authorities[0].trust_pem}
                for one in authorities:  # its key is there, and signs
                    assert one.sign(b"fleetplane/test")

    run(race())


def test_a_switch_by_a_server_that_has_not_heard_of_the_last_one_destroys_no_key_in_use() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            one, two, _ = authorities = await _all(stores, _authority)
            await one.announce(actor="t")
            await _fresh(stores)
            await one.switch(actor="t")
            await one.retire(actor="t")
            await one.announce(actor="t")
            assert (
                two.phase is SuccessionPhase.ANNOUNCED
            )  # of the step before: it has not heard of the others
            signing = one.certificate_pem
            with stores[1].writing_here(), pytest.raises(ReplacedMeanwhile):
                await two.switch(actor="t")
            await _fresh(stores)
            assert {found.certificate_pem for found in authorities} == {signing}
            assert two.phase is SuccessionPhase.ANNOUNCED
            heard = list[str]()
            two.subscribe(lambda: heard.append("step"))
            await one.switch(actor="t")
            await _fresh(stores)
            assert heard == ["step"]

    run(race())


def test_a_step_that_is_taken_while_the_authority_is_being_read_is_noticed() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            one = await _authority(stores[0])
            await stores[1].confirmed()
            read, kept = stores[1].get_secret, list[bytes | None]()

            async def slowly(name: str) -> bytes | None:
                kept.append(await read(name))
                await one.announce(actor="t")
                await stores[1].confirmed()
                return kept[-1]

            stores[1].get_secret = slowly  # type: ignore[method-assign]
            two = await _authority(stores[1])
            stores[1].get_secret = read  # type: ignore[method-assign]
            assert two.trust_pem != one.trust_pem
            await stores[1].refreshed()
            assert two.trust_pem == one.trust_pem

    run(race())


def test_tokens_signed_by_any_server_are_verified_by_all_whoever_rotates() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            keys = await _all(stores, _signing)
            signed: list[str] = []
            for _ in range(6):
                await _at_once(stores[:2], keys[:2], partial(SigningKeys.rotate, actor="t"))
                signed += [one.sign({"sub": "x"}, life_seconds=600) for one in keys]  # some by the former key
                await _fresh(stores)
                assert len({one.kid for one in keys}) == 1
                for one in keys:
                    for token in signed:
                        one.verify(token)

    run(race())


def test_a_key_is_published_on_every_server_before_it_signs() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            one, two, _ = keys = await _all(stores, _signing)
            before = one.kid
            following = await one.publish(actor="t")
            assert await one.publish(actor="t") == following
            await _fresh(stores)
            for found in keys:
                assert found.kid == before
                assert {key["kid"] for key in found.jwks()["keys"]} == {before, following}
                assert found.published_at_ns is not None
            token = two.sign({"sub": "x"}, life_seconds=600)
            assert await _here(stores[1], lambda: two.rotate(actor="t")) == following
            await _fresh(stores)
            assert {found.kid for found in keys} == {following}
            assert one.published_at_ns is None
            one.verify(token)
            one.verify(two.sign({"sub": "x"}, life_seconds=600))
            assert all(record.private_der is None for record in one._records[1:])

    run(race())


def test_a_token_made_or_revoked_on_one_server_is_known_to_all() -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            tokens = [OneTimeTokens(store, _master(store), store.clock) for store in stores]
            for one in tokens:
                await one.load()
            for number in range(ROUNDS):
                name = f"t{number}"
                outcomes = await _at_once(stores, tokens, partial(_created, name=name))
                made = [one for one in outcomes if isinstance(one, str)]
                assert len(made) == 1, outcomes
                assert sum(isinstance(one, AlreadyExists) for one in outcomes) == 2
                await _fresh(stores)
                for one in tokens:
                    assert one.authenticate(made[0]).name == f"token/{name}"
                gone = await _at_once(stores, tokens, partial(_revoked, name=name))
                assert sorted(map(str, gone)) == ["False", "False", "True"]
                await _fresh(stores)
                for one in tokens:
                    with pytest.raises(Unauthenticated):
                        one.authenticate(made[0])
            await stores[0].confirmed()
            assert stores[0].claims(TOKEN_NAME) == []

    run(race())


def test_the_active_server_reads_by_itself_what_others_revoke() -> None:
    """It looks at calls that run without asking the database each time."""

    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores, asyncio.timeout(60):
            tokens = [OneTimeTokens(store, _master(store), store.clock) for store in stores]
            for one in tokens:
                await one.load()
            keeping = asyncio.create_task(stores[0].keeping_fresh())
            made = await _here(stores[2], lambda: tokens[2].create("t", roles=ADMIN, actor="t"))
            while len(tokens[0]) == 0:
                await asyncio.sleep(0.1)
            assert tokens[0].authenticate(made)
            begun = asyncio.get_running_loop().time()
            await _here(stores[1], lambda: tokens[1].revoke("t", actor="t"))
            while len(tokens[0]):
                await asyncio.sleep(0.01)
            assert asyncio.get_running_loop().time() - begun <= 1.0, "within a second, without a bell"
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    run(race())


def test_names_of_tokens_that_were_made_before_names_were_claims_are_taken() -> None:
    async def start() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            one = OneTimeTokens(stores[0], _master(stores[0]), stores[0].clock)
            token = await one.create("old", roles=ADMIN, actor="t")
            await one.create("lost", roles=ADMIN, actor="t")

            def forget(draft: Any) -> None:
                for claim, owner in stores[0].claims(TOKEN_NAME):
                    if claim.value == "old":
                        draft.release(TOKEN_NAME, "", "name", claim.value, owner)
                draft.delete_secret("token/lost")  # by a server of the version before

            await stores[0].transact(forget, actor="t", action="t", touches=())
            again = OneTimeTokens(stores[0], _master(stores[0]), stores[0].clock)
            await again.load()
            await again.adopt()
            with pytest.raises(AlreadyExists):
                await again.create("old", roles=ADMIN, actor="t")
            assert again.authenticate(token)
            await again.create("lost", roles=ADMIN, actor="t")
            assert await again.revoke("old", actor="t")

    run(start())


def test_changes_of_keys_and_tokens_are_the_same_when_they_are_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def race() -> None:
        async with three_stores(KERNEL_KINDS) as stores:
            keys = await _all(stores, _signing)
            tokens = [OneTimeTokens(store, _master(store), store.clock) for store in stores]
            await asyncio.gather(
                _at_once(stores, tokens, partial(_created, name="t")),
                _at_once(stores, keys, partial(SigningKeys.rotate, actor="t")),
            )
            await _here(stores[1], lambda: tokens[1].revoke("t", actor="t"))

    with run_twice(monkeypatch) as seen:
        run(race())
    assert {"secret.put", "secret.delete"} <= set(seen)
