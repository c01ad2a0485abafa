"""Accounts, logins and bearers, held for both token families: that of boards and that of proxies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.kernel.leaving import leave_while_written

from fleetplane.domains.boards import server as boards
from fleetplane.domains.boards.rest import users as board_logins
from fleetplane.domains.boards.users import People, PersonSpec
from fleetplane.domains.proxies import server as proxies
from fleetplane.domains.proxies.access import Access
from fleetplane.domains.proxies.kinds.records import UserSpec
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy import logins as proxy_logins
from fleetplane.domains.proxies.tenancy.members import ApiTokens
from fleetplane.domains.proxies.tenancy.users import Users
from fleetplane.fleet.people.account_kind import ACCOUNT
from fleetplane.fleet.people.accounts import Accounts
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.people.logins import Logins, TokenPair
from fleetplane.kernel.errors import FleetplaneError, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.passwords import Passwords
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

LOGIN, PASSWORD, OTHER = "ann@example.com", "correct horse battery", "quite another password"


@dataclass(slots=True)
class Family:
    """One domain's accounts, logins and bearers, with two administrators in it."""

    accounts: Accounts[Any, Any]
    logins: Logins[Any, Any]
    bearers: Any
    revocations: Revocations
    store: Store
    clock: VirtualClock
    deactivation: dict[str, object]
    delete: Callable[[str], Awaitable[object]]

    async def log_in(self, password: str = PASSWORD) -> TokenPair:
        found = await self.accounts.authenticate(LOGIN, password, address="192.0.2.1")
        return await self.logins.open(found.account, actor="test", still_good=found.still_good)

    @property
    def name(self) -> str:
        found = self.accounts.by_login(LOGIN)
        assert found is not None
        return found.name


@asynccontextmanager
async def of_boards(path: Path, clock: VirtualClock) -> AsyncIterator[Family]:
    kinds = {kind.name: kind for kind in (*KERNEL_KINDS, *boards.BLUEPRINT.kinds)}
    async with Store.open(StoreSettings(path=path), kinds=tuple(kinds.values()), clock=clock) as store:
        master = MasterKey(bytes(32), clock)
        logins = board_logins.logins_of(store, master, clock)
        await logins.load()
        people = People(store, master, clock, logins)
        for login in (LOGIN, "bob@example.com"):
            spec = PersonSpec(username=login.partition("@")[0], email=login, role="admin")
            await people.create(spec, PASSWORD, actor="test")
        revocations = Revocations(store, clock)
        operators = await Operators.load(store, master, clock)
        yield Family(
            people,
            logins,
            board_logins.BoardBearers(store, logins, Authenticators(operators, revocations)),
            revocations,
            store,
            clock,
            {"is_active": False},
            lambda name: people.delete(name, actor="test"),
        )


@asynccontextmanager
async def of_proxies(path: Path, clock: VirtualClock) -> AsyncIterator[Family]:
    kinds = {kind.name: kind for kind in (*KERNEL_KINDS, *proxies.BLUEPRINT.kinds)}
    async with Store.open(StoreSettings(path=path), kinds=tuple(kinds.values()), clock=clock) as store:
        master = MasterKey(bytes(32), clock)
        logins = proxy_logins.logins_of(store, master, clock)
        await logins.load()
        users = Users(store, master, clock, logins)
        for login in (LOGIN, "bob@example.com"):
            await users.create(UserSpec(email=login, is_system_admin=True), PASSWORD, actor="test")
        revocations = Revocations(store, clock)
        operators = await Operators.load(store, master, clock)
        tokens = ApiTokens(store, clock, operators.tokens, Workspaces(store, Vault(store, master)))
        yield Family(
            users,
            logins,
            proxy_logins.ProxyBearers(
                store, logins, tokens, Access(store), Authenticators(operators, revocations)
            ),
            revocations,
            store,
            clock,
            {"disabled": True},
            lambda name: users.delete(name, by="", actor="test"),
        )


@pytest.fixture(params=[of_boards, of_proxies])
async def family(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Family]:
    async with request.param(tmp_path / "s.db", VirtualClock()) as found:
        yield found


class SlowPasswords:
    """Lets a check of a password be right, and then holds its answer back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked, self.go_on = asyncio.Event(), asyncio.Event()
        verify = Passwords.verify

        async def slowly(passwords: Passwords, user: str | None, password: str) -> str | None:
            found = await verify(passwords, user, password)
            self.checked.set()
            await self.go_on.wait()
            return found

        monkeypatch.setattr(Passwords, "verify", slowly)


@pytest.mark.parametrize("change", ["password", "deactivation", "deletion"])
async def test_a_login_that_is_being_checked_while_its_account_changes_is_refused(
    family: Family, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    name = family.name
    slow = SlowPasswords(monkeypatch)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:

        async def refused() -> None:
            with pytest.raises(Unauthenticated):
                await family.log_in()

        tasks.create_task(refused())
        await slow.checked.wait()
        if change == "password":
            await family.accounts.set_password(name, OTHER, actor="test")
        elif change == "deactivation":
            await family.accounts.update(name, family.deactivation, actor="test")
        else:
            await family.delete(name)
        slow.go_on.set()
    assert family.logins._records.list(family.store, name) == []


async def test_a_login_with_the_former_password_that_begins_while_the_next_is_hashed_is_refused(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, slow = family.name, SlowPasswords(monkeypatch)
    hashing, hashed = Passwords.hash, asyncio.Event()

    async def slowly(passwords: Passwords, password: str) -> str:
        await hashed.wait()
        return await hashing(passwords, password)

    monkeypatch.setattr(Passwords, "hash", slowly)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:

        async def refused() -> None:
            with pytest.raises(Unauthenticated):
                await family.log_in()

        replacing = tasks.create_task(family.accounts.set_password(name, OTHER, actor="test"))
        await asyncio.sleep(0)
        tasks.create_task(refused())
        await slow.checked.wait()
        hashed.set()
        await replacing
        slow.go_on.set()
    assert family.logins._records.list(family.store, name) == []


@pytest.mark.parametrize("change", ["password", "deactivation", "deletion"])
async def test_logins_end_with_what_shuts_their_user_out_although_whoever_wanted_that_left(
    family: Family, change: str
) -> None:
    name, _ = family.name, await family.log_in()

    async def deleted() -> None:
        await family.delete(name)

    asked: dict[str, Coroutine[Any, Any, Any]] = {
        "password": family.accounts.set_password(name, OTHER, actor="test"),
        "deactivation": family.accounts.update(name, family.deactivation, actor="test"),
        "deletion": deleted(),
    }
    await leave_while_written(family.store, asked.pop(change))
    for other in asked.values():
        other.close()
    assert family.logins._records.list(family.store, name) == []


async def test_closing_ends_a_login_that_is_being_opened(family: Family) -> None:
    name = family.name
    account = family.accounts.get(name)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(family.logins.open(account, actor="test"))
        tasks.create_task(family.logins.close(name, actor="test"))
    assert family.logins._records.list(family.store, name) == []


async def test_a_password_that_was_replaced_is_not_undone_by_hashing_the_former_one_anew(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Passwords, "outdated", lambda *_: True)
    slow = SlowPasswords(monkeypatch)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:

        async def refused() -> None:
            with pytest.raises(Unauthenticated):
                await family.log_in()

        tasks.create_task(refused())
        await slow.checked.wait()
        await family.accounts.set_password(family.name, OTHER, actor="test")
        slow.go_on.set()
    with pytest.raises(Unauthenticated):
        await family.log_in()
    await family.log_in(OTHER)


async def test_a_revoked_user_is_refused_with_a_token_that_was_good_before(family: Family) -> None:
    token = (await family.log_in()).access
    caller = family.bearers.of_header(f"Bearer {token}")
    await family.revocations.revoke(principal=caller.name, reason="left", actor="test")
    with pytest.raises(Unauthenticated, match="was revoked: left"):
        family.bearers.of_token(token)
    with pytest.raises(Unauthenticated, match="was revoked: left"):
        family.bearers.of_token((await family.log_in()).access)
    await family.revocations.lift(principal=caller.name, actor="test")
    assert family.bearers.of_token(token).name == caller.name


async def test_every_change_that_shuts_a_user_out_ends_their_open_logins(family: Family) -> None:
    changes: list[Callable[[], Awaitable[object]]] = [
        lambda: family.accounts.set_password(family.name, PASSWORD, actor="test"),
        lambda: family.accounts.update(family.name, family.deactivation, actor="test"),
    ]
    for change in changes:
        pair = await family.log_in()
        family.bearers.of_token(pair.access)
        await change()
        with pytest.raises(Unauthenticated):
            family.bearers.of_token(pair.access)
        with pytest.raises(Unauthenticated):
            await family.logins.refresh(pair.refresh, actor="test")


@pytest.mark.parametrize(
    ("changes", "password"), [({"email": "not an address"}, OTHER), ({"email": "new@example.com"}, "short")]
)
async def test_a_change_that_is_refused_changes_neither_the_user_nor_the_password(
    family: Family, changes: dict[str, object], password: str
) -> None:
    before = family.accounts.get(family.name)
    with pytest.raises(FleetplaneError):
        await family.accounts.change(family.name, changes, password=password, actor="test")
    assert family.accounts.get(family.name) == before
    await family.log_in()
    assert family.accounts.by_login("new@example.com") is None


async def test_a_refresh_token_stays_the_same_or_is_good_once_as_its_family_promises(family: Family) -> None:
    first = await family.log_in()
    second = await family.logins.refresh(first.refresh, actor="test")
    family.bearers.of_token(second.access)
    if family.logins._refresh_tokens.rotates:
        assert second.refresh != first.refresh
        with pytest.raises(Unauthenticated):
            await family.logins.refresh(first.refresh, actor="test")
        with pytest.raises(Unauthenticated):
            family.bearers.of_token(second.access)
    else:
        assert second.refresh == first.refresh
        await family.logins.refresh(first.refresh, actor="test")
        with pytest.raises(Unauthenticated, match="not one for access"):
            family.bearers.of_token(first.refresh)


async def test_an_access_token_that_was_verified_before_still_expires(family: Family) -> None:
    token = (await family.log_in()).access
    family.bearers.of_token(token)
    await family.clock.advance(family.logins._policy.access_seconds + 2)
    with pytest.raises(Unauthenticated, match="expired"):
        family.bearers.of_token(token)


async def test_sweeping_deletes_logins_that_are_over_and_replaces_an_old_key(family: Family) -> None:
    await family.log_in()
    assert await family.logins.sweep() is None
    assert len(family.logins._records.list(family.store)) == 1
    await family.clock.advance(family.logins._policy.refresh_seconds + 1)
    await family.clock.advance(family.logins._policy.key_life_seconds)
    assert await family.logins.sweep() is not None
    assert family.logins._records.list(family.store) == []


async def test_what_no_family_knows_is_refused(family: Family) -> None:
    for token in ("x", "a.b.c", "fp_nothing"):
        with pytest.raises(Unauthenticated):
            family.bearers.of_token(token)
    with pytest.raises(Unauthenticated):
        family.bearers.of_header("Basic abc")


async def test_logins_that_are_opened_at_once_are_not_more_than_there_may_be(family: Family) -> None:
    found = await family.accounts.authenticate(LOGIN, PASSWORD, address="192.0.2.1")
    limit = family.logins._policy.limit
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for _ in range(limit + 5):
            tasks.create_task(family.logins.open(found.account, actor="test"))
    assert len(family.logins._records.list(family.store, family.name)) == limit


async def test_a_password_that_another_server_replaced_meanwhile_opens_no_login(family: Family) -> None:
    """What is compared is stored: nothing in this process was told."""
    found = await family.accounts.authenticate(LOGIN, PASSWORD, address="192.0.2.1")
    account = family.accounts.account_of(family.name)
    spec = msgspec.structs.replace(account.spec, password_version=account.spec.password_version + 1)
    await family.store.transact(
        lambda draft: draft.put(ACCOUNT, account.scope, account.name, spec=spec),
        actor="another server",
        action="people.password",
        touches=[account.key],
    )
    with pytest.raises(Unauthenticated):
        await family.logins.open(found.account, actor="test", still_good=found.still_good)
