"""People at several servers that share a database: what is good once is good once, wherever it is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
from support.shared.run_twice import run_twice
from support.shared.three_stores import three_stores
from support.shared.virtual_loop import run

from fleetplane.domains.operators import BLUEPRINT
from fleetplane.domains.proxies.kinds.records import USER
from fleetplane.domains.proxies.server import BLUEPRINT as PROXIES
from fleetplane.domains.proxies.tenancy.users import Users
from fleetplane.fleet.people import own_accounts, token_sessions
from fleetplane.fleet.people.account_kind import AccountSpec
from fleetplane.fleet.people.attempts import shared_failures
from fleetplane.fleet.people.attempts.shared_failures import LOGIN_FAILURES, wait_seconds
from fleetplane.fleet.people.devices.grants import (
    DEVICE_GRANT,
    GRANTS_PER_NETWORK,
    DeviceGrants,
    GrantApproval,
    GrantStep,
)
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.people.logins import TokenPair
from fleetplane.fleet.people.openid.id_tokens import VouchedPerson
from fleetplane.fleet.people.openid.used import UsedSignIns
from fleetplane.fleet.people.own_accounts import ACCOUNT_LOGIN, OwnAccounts
from fleetplane.fleet.people.token_sessions import TokenSessions
from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import AlreadyExists, ResourceExhausted, Unauthenticated
from fleetplane.kernel.identity import MasterKey, passwords
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

T = TypeVar("T")
PASSWORD = "correct horse battery"
KINDS = (*KERNEL_KINDS, *BLUEPRINT.kinds)
ROUNDS = 10


class Server:
    """What one server knows of people."""

    def __init__(self, store: Store) -> None:
        clock, master = store.clock, MasterKey(bytes(32), store.clock)
        self.store = store
        self.logins = own_accounts.logins_of(store, master, clock)
        self.accounts = OwnAccounts(store, master, clock, self.logins)
        self.grants = DeviceGrants(store, clock)
        self.used = UsedSignIns(store, clock)
        self.operators = Operators(store, master, clock)
        door = Authenticators(self.operators, Revocations(store, clock))
        self.links = TokenSessions(door, store, master, clock)

    async def here(self, work: Callable[[Server], Awaitable[T]]) -> T:
        """As a call does it that may write on every server."""
        await self.store.confirmed()
        await self.store.refreshed()
        with self.store.writing_here():
            return await work(self)


@asynccontextmanager
async def servers() -> AsyncIterator[Sequence[Server]]:
    async with three_stores(KINDS) as stores:
        found = [Server(store) for store in stores]
        for one in found:
            await one.here(lambda one: one.logins.load())
            await one.operators.tokens.load()
        yield found


async def at_once(found: Sequence[Server], work: Callable[[Server], Awaitable[T]]) -> list[T | Exception]:
    async def outcome(one: Server) -> T | Exception:
        try:
            return await one.here(work)
        except Exception as error:
            return error

    return list(await asyncio.gather(*(outcome(one) for one in found)))


def succeeded(outcomes: Sequence[T | Exception]) -> list[T]:
    return [one for one in outcomes if not isinstance(one, Exception)]


@pytest.fixture(autouse=True)
def twice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever these tests write comes to the same when it is run again."""
    with run_twice(monkeypatch) as seen:
        yield
    assert seen


async def make(one: Server, name: str = "ann") -> object:
    return await one.accounts.create(AccountSpec(login=name), PASSWORD, actor="t")


async def log_in(one: Server, password: str = PASSWORD, address: str = "192.0.2.1") -> TokenPair:
    found = await one.accounts.authenticate("ann", password, address=address)
    return await one.logins.open(found.account, actor="t", still_good=found.still_good)


def test_an_account_is_made_once_and_logs_in_and_out_anywhere() -> None:
    async def race() -> None:
        async with servers() as found:
            made = await at_once(found, make)
            assert len(succeeded(made)) == 1
            assert all(isinstance(one, AlreadyExists) for one in made if isinstance(one, Exception))
            for index in range(3):
                pair = await found[index].here(log_in)
                for one in found:
                    await one.store.confirmed()
                    assert one.logins.verify(pair.access).account.name == "ann"
                other = found[(index + 1) % 3]
                await other.here(lambda one, pair=pair: one.logins.close("ann", actor="t"))  # type: ignore[misc]
                for one in found:
                    await one.store.confirmed()
                    with pytest.raises(Unauthenticated):
                        one.logins.verify(pair.access)

    run(race())


def test_at_the_first_start_of_three_servers_at_once_there_is_one_first_administrator() -> None:
    async def start() -> None:
        async with three_stores((*KINDS, *PROXIES.kinds)) as stores:
            found = [Server(store) for store in stores]
            shown = succeeded(await at_once(found, _administered))
            assert len(shown) == 3
            assert len([one for one in shown if one is not None]) == 1, "its password is shown once"
            for one in found:
                await one.store.confirmed()
                assert one.store.count(USER) == 1

    run(start())


async def _administered(one: Server) -> str | None:
    users = Users(one.store, MasterKey(bytes(32), one.store.clock), one.store.clock, one.logins)
    return await users.first_administrator("admin@example.com", "")


def test_a_refresh_token_shown_to_three_servers_at_once_is_traded_once() -> None:
    async def race() -> None:
        async with servers() as found:
            await found[0].here(make)
            for number in range(ROUNDS):
                pair = await found[number % 3].here(log_in)
                traded = await at_once(found, partial(_refreshed, token=pair.refresh))
                assert len(succeeded(traded)) == 1, traded
                # Whoever comes with it after that has copied it: what stems from it ends.
                for one in found:
                    await one.store.confirmed()
                    assert one.store.count(ACCOUNT_LOGIN) == 0

    run(race())


async def _refreshed(one: Server, *, token: str) -> TokenPair:
    return await one.logins.refresh(token, actor="t")


def test_a_password_replaced_on_one_server_lets_nobody_in_with_the_former_on_another() -> None:
    async def race() -> None:
        async with servers() as found:
            await found[0].here(make)
            pair = await found[1].here(log_in)
            await found[2].here(lambda one: one.accounts.set_password("ann", "another password", actor="t"))
            for one in found:
                await one.store.confirmed()
                with pytest.raises(Unauthenticated):
                    one.logins.verify(pair.access)
                with pytest.raises(Unauthenticated):
                    await one.here(log_in)
            await found[0].here(partial(log_in, password="another password"))

    run(race())


def test_wrong_passwords_at_three_servers_count_together() -> None:
    async def race() -> None:
        async with servers() as found:
            await found[0].here(make)
            limit = own_accounts.RULES.limits.failures
            for name in ("ann", "nobody"):
                guess = partial(_guessed, name=name)
                told = [await found[number % 3].here(guess) for number in range(limit + 3)]
                assert told == ["wrong"] * limit + ["wait"] * 3
            await found[1].here(partial(log_in, address="198.51.100.7"))  # its owner, from elsewhere
            for one in found:
                with pytest.raises(ResourceExhausted):
                    await one.here(log_in)
            await found[2].here(lambda one: one.accounts.set_password("ann", "another password", actor="t"))
            assert await found[2].here(partial(_guessed, name="ann")) == "wrong"
            await found[2].here(partial(log_in, password="another password"))

    run(race())


async def _guessed(one: Server, *, name: str, address: str = "192.0.2.1") -> str:
    try:
        await one.accounts.authenticate(name, "a guess at it", address=address)
    except Unauthenticated:
        return "wrong"
    except ResourceExhausted:
        return "wait"
    raise AssertionError("it was right")


def test_wrong_passwords_at_three_servers_at_once_are_no_more_than_at_one() -> None:
    async def race() -> None:
        async with servers() as found:
            told = [one for _ in range(4) for one in await at_once(found, partial(_guessed, name="x"))]
            assert told.count("wrong") == own_accounts.RULES.limits.failures, told

    run(race())


def test_names_that_strangers_make_up_fill_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_failures, "ENTRIES_LIMIT", 4)

    async def flood() -> None:
        async with servers() as found:
            for number in range(300):
                address = f"203.0.113.{number % 250}"
                await found[number % 3].here(partial(_guessed, name=f"x{number}", address=address))
            rows = found[0].store.list(LOGIN_FAILURES)
            assert len(rows) <= 256
            assert max(len(row.spec.at) for row in rows) <= 4
            await asyncio.sleep(passwords.PAUSE_SECONDS)
            now = found[0].store.clock.now_ns() // NS
            assert {wait_seconds(at, 1, now) for row in rows for at in row.spec.at.values()} == {0}

    run(flood())


def test_a_device_is_approved_on_one_server_and_let_in_once_by_the_others() -> None:
    async def race() -> None:
        async with servers() as found:
            for number in range(ROUNDS):
                asked = await found[0].here(lambda one: one.grants.begin("cli", "192.0.2.9"))
                approval = GrantApproval(account="ann", login="l")
                decided = await at_once(found, partial(_decided, code=asked.user_code, approval=approval))
                assert len(succeeded(decided)) == 1
                polled = succeeded(await at_once(found, partial(_polled, code=asked.device_code)))
                steps = sorted(one.step for one in polled)
                assert steps == [GrantStep.APPROVED, GrantStep.EXPIRED, GrantStep.EXPIRED], (number, polled)

    run(race())


async def _decided(one: Server, *, code: str, approval: GrantApproval) -> object:
    return await one.grants.decide(code, approval, actor="t")


async def _polled(one: Server, *, code: str) -> Any:
    return await one.grants.poll(code)


def test_grants_of_one_network_are_limited_over_all_servers() -> None:
    async def race() -> None:
        async with servers() as found:
            for _ in range(GRANTS_PER_NETWORK):
                begun = await at_once(found, lambda one: one.grants.begin("cli", "192.0.2.9"))
                assert len(succeeded(begun)) == 3
            await found[0].store.confirmed()
            assert found[0].store.count(DEVICE_GRANT) == GRANTS_PER_NETWORK

    run(race())


def test_an_openid_sign_in_is_finished_once_and_makes_one_account() -> None:
    async def race() -> None:
        async with servers() as found:
            for number in range(ROUNDS):
                ends = found[0].store.clock.now_ns() + 10**11
                used = await at_once(found, partial(_used, state=f"s{number}", ends_at_ns=ends))
                assert len(succeeded(used)) == 1
                identity = VouchedPerson(issuer="https://id.example", subject=f"s{number}", name="bob")
                made = await at_once(found, partial(_vouched, identity=identity))
                assert len({one.account.name for one in succeeded(made)}) == 1
                assert len(succeeded(made)) == 3

    run(race())


async def _used(one: Server, *, state: str, ends_at_ns: int) -> None:
    await one.used.use(state, ends_at_ns=ends_at_ns)


async def _vouched(one: Server, *, identity: VouchedPerson) -> Any:
    return await one.accounts.of_identity(identity, may_create=True)


def test_a_link_opens_one_session_at_whichever_server() -> None:
    async def race() -> None:
        async with servers() as found:
            roles = frozenset({Role("admin")})
            token = await found[1].here(lambda one: one.operators.tokens.create("t", roles=roles, actor="t"))
            for _ in range(ROUNDS):
                code = await found[0].here(lambda one: one.links.link(token, actor="t"))
                opened = await at_once(found, partial(_redeemed, code=code))
                assert len(succeeded(opened)) == 1
                for one in found:
                    await one.store.confirmed()
                    assert one.links.recognise(succeeded(opened)[0].cookie).name == "token/t"

    run(race())


async def _redeemed(one: Server, *, code: str) -> token_sessions.OpenedSession:
    return await one.links.redeem(code)
