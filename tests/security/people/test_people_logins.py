"""A stranger who guesses passwords waits; the account's owner does not."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.boards.boards_rig import boards_rig
from support.proxies.proxy_api import ADMIN_EMAIL, ADMIN_PASSWORD, Api, rest_api

from fleetplane.domains.boards.users import People, PersonSpec
from fleetplane.fleet.people.attempts.throttle import (
    FAILURES_EVERYWHERE,
    KNOWN_PER_MINUTE,
    Guesses,
    LoginAttempt,
    ThrottleLimits,
)
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import ResourceExhausted, Unauthenticated
from fleetplane.kernel.identity.passwords import PAUSE_SECONDS, STRANGERS_WAITING, Passwords
from fleetplane.kernel.networks import network_of

HOME, STRANGER = "203.0.113.5", "198.51.100.66"
PASSWORD = "a long enough password"


class StandingClock(SystemClock):
    """A moment that does not pass: what is counted is counted within one minute."""

    def __init__(self) -> None:
        self._now_ns, self._monotonic = SystemClock().now_ns(), SystemClock().monotonic()

    def now_ns(self) -> int:
        return self._now_ns

    def monotonic(self) -> float:
        return self._monotonic


async def login(api: Api, address: str, password: str) -> httpx.Response:
    """As somebody who comes from an address."""
    transport = httpx.ASGITransport(app=api.http._transport.app, client=(address, 4711))  # type: ignore[attr-defined]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post("/v1/auth/login", json={"email": ADMIN_EMAIL, "password": password})


async def guess(api: Api, address: str, times: int) -> list[int]:
    return [(await login(api, address, "wrong password")).status_code for _ in range(times)]


async def test_guesses_of_a_stranger_do_not_lock_the_owner_out(tmp_path: Path) -> None:
    async with rest_api(tmp_path, clock=StandingClock()) as api:
        assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200
        assert await guess(api, STRANGER, 12) == [401] * 10 + [429] * 2
        refused = await login(api, STRANGER, ADMIN_PASSWORD)
        assert refused.status_code == 429, "who guessed waits, also with the right password"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200
        assert (await login(api, "203.0.113.77", ADMIN_PASSWORD)).status_code == 200, "nor from a new address"


async def test_the_right_password_from_a_known_address_gets_in_though_it_was_mistyped_there(
    tmp_path: Path,
) -> None:
    async with rest_api(tmp_path, clock=StandingClock()) as api:
        assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200
        await guess(api, HOME, KNOWN_PER_MINUTE - 2)
        assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200


async def test_known_addresses_are_known_after_a_restart_and_guesses_there_are_bounded(
    tmp_path: Path,
) -> None:
    async with rest_api(tmp_path, clock=StandingClock()) as api:
        assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200
    async with rest_api(tmp_path, clock=StandingClock()) as api:
        codes = await guess(api, HOME, KNOWN_PER_MINUTE + 2)
        assert codes == [401] * KNOWN_PER_MINUTE + [429] * 2


async def test_a_flood_of_wrong_logins_is_refused_before_it_is_hashed_and_the_owner_gets_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits, hashed, go_on = Passwords._fits, Counter[str](), threading.Event()

    def slowly(passwords: Passwords, stored: str, password: str) -> bool:
        hashed[password] += 1
        if password != ADMIN_PASSWORD:
            go_on.wait(60)
        return fits(passwords, stored, password)

    async with rest_api(tmp_path, clock=StandingClock()) as api:
        assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200
        monkeypatch.setattr(Passwords, "_fits", slowly)
        addresses = [f"198.51.{number}.1" for number in range(100)]
        flood = [
            asyncio.create_task(login(api, one, "wrong password")) for one in addresses for _ in range(4)
        ]
        try:
            while sum(one.done() for one in flood) < len(flood) - STRANGERS_WAITING - 1:
                await asyncio.wait([one for one in flood if not one.done()], return_when="FIRST_COMPLETED")
            async with asyncio.timeout(60):
                while not hashed:  # its thread has been given the work, and begins when it can
                    await asyncio.sleep(0.01)
            assert hashed == {"wrong password": 1}, "the others wait, or were refused"
            assert (await login(api, HOME, ADMIN_PASSWORD)).status_code == 200
            assert (await api.http.get("/healthz")).status_code == 200
        finally:
            go_on.set()
        answers = [await one for one in flood]
        assert Counter(one.status_code for one in answers)[429] >= len(flood) - STRANGERS_WAITING - 1
        assert all(int(one.headers["retry-after"]) for one in answers if one.status_code == 429)
        new = await login(api, "203.0.113.77", ADMIN_PASSWORD)
        assert new.status_code == 200, "what was refused before it was hashed was no guess at the account"


def attempt(address: str, *, account: str = "user/1", known: bool = False) -> LoginAttempt:
    return LoginAttempt(account=account, network=network_of(address), known=known)


def test_many_strangers_at_once_are_slowed_and_known_addresses_are_not() -> None:
    guesses = Guesses(ThrottleLimits(per_address=1000, failures=10))
    for number in range(FAILURES_EVERYWHERE):
        assert guesses.wait_seconds(attempt(f"198.51.100.{number % 200}"), now=float(number)) == 0
    now = float(FAILURES_EVERYWHERE)
    assert guesses.wait_seconds(attempt("192.0.2.1"), now=now) > 0
    assert guesses.wait_seconds(attempt(HOME, known=True), now=now) == 0
    assert guesses.wait_seconds(attempt("192.0.2.1", account="user/2"), now=now) == 0
    assert guesses.wait_seconds(attempt("192.0.2.1"), now=now + PAUSE_SECONDS) == 0


def test_attempts_that_are_still_being_checked_count_already() -> None:
    guesses = Guesses(ThrottleLimits(per_address=1000, failures=10))
    waits = [guesses.wait_seconds(attempt(STRANGER), now=0.0) for _ in range(20)]
    assert [wait > 0 for wait in waits] == [False] * 10 + [True] * 10


def test_one_household_is_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1")
    assert network_of("2001:db8::1") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")


@asynccontextmanager
async def board_people(tmp_path: Path) -> AsyncIterator[People]:
    async with boards_rig(tmp_path) as rig:
        people = rig.domain.rest.people
        await people.create(
            PersonSpec(username="ann", email="ann@example.com", role="viewer"), PASSWORD, actor="test"
        )
        yield people


async def test_boards_let_the_owner_in_while_a_stranger_guesses(tmp_path: Path) -> None:
    async with board_people(tmp_path) as people:
        assert (await people.authenticate("ann", PASSWORD, address=HOME)).account.spec.username == "ann"
        for name in ("ann", "ann@example.com") * 3:
            with pytest.raises((Unauthenticated, ResourceExhausted)):
                await people.authenticate(name, "wrong", address=STRANGER)
        for name in ("ann", "ann@example.com"):
            with pytest.raises(ResourceExhausted):
                await people.authenticate(name, PASSWORD, address=STRANGER)
            assert (await people.authenticate(name, PASSWORD, address=HOME)).account.spec.username == "ann"
