"""Logins that are approved in a browser: what a program is told, when, and how often. No server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetplane.fleet.people.devices.grants import (
    ALPHABET,
    DEVICE_GRANT,
    GRANTS_LIMIT,
    GRANTS_PER_NETWORK,
    LIFE_SECONDS,
    DeviceGrant,
    DeviceGrants,
    DeviceGrantSpec,
    GrantApproval,
    GrantStep,
    making_room,
    normalised,
    shown,
)
from fleetplane.fleet.people.openid.used import USED_SIGN_IN, UsedSignIns
from fleetplane.fleet.resources.common import made_up
from fleetplane.kernel.errors import NotFound, ResourceExhausted, Unauthenticated
from fleetplane.kernel.networks import wider_network_of
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

ANN = GrantApproval(account="ann", login="login-1")
KINDS = (DEVICE_GRANT, USED_SIGN_IN)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KINDS, clock=clock) as store:
        yield store


@pytest.fixture
def grants(store: Store, clock: VirtualClock) -> DeviceGrants:
    return DeviceGrants(store, clock)


async def test_a_program_waits_until_somebody_approves_and_is_told_once(
    clock: VirtualClock, grants: DeviceGrants
) -> None:
    asked = await grants.begin("fleetplane on laptop", "192.0.2.1")
    assert (await grants.poll(asked.device_code)).step is GrantStep.PENDING
    found = await grants.decide(shown(asked.user_code).lower(), ANN, actor="test")
    assert (found.spec.client, found.spec.address) == ("fleetplane on laptop", "192.0.2.1")
    await clock.advance(5)
    done = await grants.poll(asked.device_code)
    assert (done.step, done.approval) == (GrantStep.APPROVED, ANN)
    await clock.advance(5)
    assert (await grants.poll(asked.device_code)).step is GrantStep.EXPIRED, "its code is good once"


async def test_who_asks_too_often_is_slowed_and_not_told_the_outcome(
    clock: VirtualClock, grants: DeviceGrants
) -> None:
    asked = await grants.begin("", "192.0.2.1")
    assert (await grants.poll(asked.device_code)).step is GrantStep.PENDING
    await grants.decide(asked.user_code, ANN, actor="test")
    intervals = [await grants.poll(asked.device_code) for _ in range(20)]
    assert {one.step for one in intervals} == {GrantStep.SLOW_DOWN}
    assert [one.interval_seconds for one in intervals[:3]] == [10, 15, 20]
    assert intervals[-1].interval_seconds == 60
    await clock.advance(60)
    assert (await grants.poll(asked.device_code)).step is GrantStep.APPROVED


async def test_a_refused_login_is_refused_and_nobody_decides_twice(grants: DeviceGrants) -> None:
    asked, other = await grants.begin("", "192.0.2.1"), await grants.begin("", "192.0.2.1")
    await grants.decide(asked.user_code, None, actor="test")
    for again in (ANN, None):
        with pytest.raises(NotFound):
            await grants.decide(asked.user_code, again, actor="test")
    assert (await grants.poll(asked.device_code)).step is GrantStep.DENIED
    await grants.decide(other.user_code, ANN, actor="test")
    with pytest.raises(NotFound):
        await grants.decide(other.user_code, None, actor="test")


async def test_a_login_that_nobody_approves_expires(clock: VirtualClock, grants: DeviceGrants) -> None:
    asked, late = await grants.begin("", "192.0.2.1"), await grants.begin("", "192.0.2.1")
    await grants.decide(late.user_code, ANN, actor="test")
    await clock.advance(LIFE_SECONDS)
    with pytest.raises(NotFound):
        grants.pending(asked.user_code)
    for one in (asked, late):
        assert (await grants.poll(one.device_code)).step is GrantStep.EXPIRED
    for code in ("", "x", asked.user_code, "\udcff"):
        assert (await grants.poll(code)).step is GrantStep.EXPIRED


async def test_a_login_goes_on_at_a_server_that_was_started_again(
    clock: VirtualClock, store: Store, grants: DeviceGrants
) -> None:
    asked = await grants.begin("", "192.0.2.1")
    again = DeviceGrants(store, clock)
    await again.decide(asked.user_code, ANN, actor="test")
    answers = [await DeviceGrants(store, clock).poll(asked.device_code) for _ in range(2)]
    assert [one.step for one in answers] == [GrantStep.APPROVED, GrantStep.EXPIRED], "once, whoever is asked"

    used = UsedSignIns(store, clock)
    await used.use("state", ends_at_ns=clock.now_ns() + 1)
    for server in (used, UsedSignIns(store, clock)):
        with pytest.raises(Unauthenticated):
            server.check("state")
        with pytest.raises(Unauthenticated):
            await server.use("state", ends_at_ns=clock.now_ns() + 1)
    await again.begin("", "192.0.2.1")
    await clock.advance(LIFE_SECONDS)
    await used.sweep()
    await again.sweep()
    assert store.count(USED_SIGN_IN) == store.count(DEVICE_GRANT) == 0


async def test_a_sign_in_is_not_finished_again_once_it_is_over_and_forgotten(
    clock: VirtualClock, store: Store
) -> None:
    used, ends_at_ns = UsedSignIns(store, clock), clock.now_ns() + 1
    used.check("state")  # by a second one, whom the provider lets wait
    await used.use("state", ends_at_ns=ends_at_ns)
    await clock.advance(1)
    await used.sweep()
    with pytest.raises(Unauthenticated):
        await used.use("state", ends_at_ns=ends_at_ns)


async def test_one_network_begins_few_and_its_oldest_makes_room(
    clock: VirtualClock, grants: DeviceGrants
) -> None:
    asked = [await grants.begin("", "2001:db8::1") for _ in range(GRANTS_PER_NETWORK)]
    with pytest.raises(ResourceExhausted):
        await grants.begin("", "2001:db8::2")
    await grants.decide(asked[0].user_code, ANN, actor="test")
    await clock.advance(120)
    for _ in range(2):
        await grants.begin("", "2001:db8::2")
    assert (await grants.poll(asked[0].device_code)).step is GrantStep.APPROVED, "one that was approved stays"
    assert (await grants.poll(asked[1].device_code)).step is GrantStep.EXPIRED
    assert (await grants.poll(asked[2].device_code)).step is GrantStep.PENDING


def grant(number: int, address: str, *, account: str = "") -> DeviceGrant:
    spec = DeviceGrantSpec(
        user_code="", client="", address=address, asked_at_ns=number, ends_at_ns=0, account=account
    )
    return made_up(DEVICE_GRANT, str(number), spec=spec)


def test_grants_from_elsewhere_do_not_keep_a_login_out() -> None:
    mine = grant(0, "198.51.100.7")
    flood = [grant(1 + number, f"2001:db8:1:{number:x}::1") for number in range(GRANTS_LIMIT - 1)]
    assert making_room([mine, *flood[:-1]], "203.0.113.1") == [], "there is room"
    assert making_room([mine, *flood], "203.0.113.1") == [flood[0]], "who has most makes room"
    assert making_room([mine, *flood], "2001:db8:1:ffff::1") == [flood[0]]
    spread = [grant(1 + number, f"10.{number // 250}.{number % 250}.1") for number in range(GRANTS_LIMIT - 1)]
    assert making_room([mine, *spread, grant(5000, "10.0.0.2")], "203.0.113.1") == [spread[0]]
    decided = [grant(number, "192.0.2.1", account="ann") for number in range(GRANTS_LIMIT)]
    with pytest.raises(ResourceExhausted):
        making_room(decided, "203.0.113.1")
    wide = [wider_network_of(one) for one in ("192.0.2.9", "2001:db8:1:2::3", "::ffff:192.0.2.9", "unix")]
    assert wide == ["192.0.2.0/24", "2001:db8:1::/48", "192.0.2.0/24", "unix"]


async def test_codes_are_typed_as_people_type(grants: DeviceGrants) -> None:
    code = (await grants.begin("", "192.0.2.1")).user_code
    assert len(code) == 8
    assert set(code) <= set(ALPHABET)
    for typed in (code, shown(code), shown(code).lower(), f" {code[:4]} {code[4:]}\n"):
        assert normalised(typed) == code
    for typed in ("", "-", code[:7], code + "B"):
        with pytest.raises(NotFound):
            grants.pending(typed)
