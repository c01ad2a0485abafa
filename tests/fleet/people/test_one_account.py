"""One account for a person, whichever family's login they come by; and users of before who get one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from structlog.testing import capture_logs

from fleetplane.domains.boards import server as boards
from fleetplane.domains.boards.inventory.clusters import BoardPlaces
from fleetplane.domains.boards.kinds import SCOPE as BOARDS
from fleetplane.domains.boards.rest import users as board_logins
from fleetplane.domains.boards.users import PERSON, PERSON_RULES, People, PersonSpec
from fleetplane.domains.operators import BLUEPRINT as OPERATORS
from fleetplane.domains.proxies import server as proxies
from fleetplane.domains.proxies.access import SYSTEM_ADMIN, Access
from fleetplane.domains.proxies.kinds.records import MEMBERSHIP, USER, MembershipSpec, UserSpec, user_scope
from fleetplane.domains.proxies.kinds.unique import register
from fleetplane.domains.proxies.kinds.values import OrganizationRole
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy import logins as proxy_logins
from fleetplane.domains.proxies.tenancy.members import ApiTokens
from fleetplane.domains.proxies.tenancy.users import ADMIN_EMAIL, USER_RULES, Users
from fleetplane.fleet.people import own_accounts
from fleetplane.fleet.people.account_kind import ACCOUNT, SCOPE, AccountSpec, account_behind, subject_of
from fleetplane.fleet.people.account_migration import migrate
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.people.own_accounts import OwnAccounts
from fleetplane.kernel.errors import (
    AlreadyExists,
    FleetplaneError,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
)
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Draft, Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

PASSWORD, OTHER = "correct horse battery", "quite another password"
FORMERLY = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
"""Parameters of before, which are cheap."""
HERE = "192.0.2.1"


@dataclass(slots=True)
class House:
    """Everybody who can log in to one server, without the server."""

    store: Store
    master: MasterKey
    door: Authenticators
    bindings: Bindings
    accounts: OwnAccounts
    users: Users
    people: People
    logins: dict[str, Any]

    async def log_in(self, family: str, name: str, password: str = PASSWORD) -> str:
        accounts: dict[str, Any] = {"people": self.accounts, "proxies": self.users, "boards": self.people}
        found = await accounts[family].authenticate(name, password, address=HERE)
        pair = await self.logins[family].open(found.account, actor="test", still_good=found.still_good)
        return str(pair.access)

    def held(self, token: str) -> set[tuple[str, str]]:
        principal = self.door.authenticate(token)
        own = {(str(role), principal.scope) for role in principal.roles}
        return own | {(str(one.role), one.scope) for one in principal.bindings}

    async def migrate(self) -> int:
        return await migrate(self.store, self.master, USER_RULES) + await migrate(
            self.store, self.master, PERSON_RULES
        )

    # As they were stored before there were accounts.

    async def former(self, family: str, identity: str, login: str, password: str, *, admin: bool) -> None:
        def change(draft: Draft) -> None:
            if family == "proxies":
                scope = user_scope(identity)
                draft.claim(USER, "", "email", login, identity)
                register(draft, USER, scope, identity)
                draft.put(USER, scope, identity, spec=UserSpec(email=login, is_system_admin=admin))
            else:
                draft.claim(PERSON, BOARDS, "login", login, identity)
                role = "admin" if admin else "viewer"
                draft.put(PERSON, BOARDS, identity, spec=PersonSpec(username=login, role=role))
            name = f"{family}/password/{identity}"
            sealed = self.master.seal(FORMERLY.hash(password).encode(), purpose=name)
            draft.put_secret(name, sealed)

        keys = [USER.key(user_scope(identity), identity), PERSON.key(BOARDS, identity)]
        await self.store.transact(change, actor="test", action="test", touches=keys)


@asynccontextmanager
async def opened(path: Path, clock: VirtualClock) -> AsyncIterator[House]:
    blueprints = (boards.BLUEPRINT, proxies.BLUEPRINT, OPERATORS)
    kinds = (*KERNEL_KINDS, *(kind for blueprint in blueprints for kind in blueprint.kinds))
    async with Store.open(StoreSettings(path=path), kinds=kinds, clock=clock) as store:
        master = MasterKey(bytes(32), clock)
        bindings = Bindings(store)
        operators = await Operators.load(store, master, clock)
        door = Authenticators(operators, Revocations(store, clock), bindings)
        door.tree.add(BoardPlaces(store))
        own, there, here = (
            module.logins_of(store, master, clock) for module in (own_accounts, proxy_logins, board_logins)
        )
        for logins in (own, there, here):
            await logins.load()
        tokens = ApiTokens(store, clock, operators.tokens, Workspaces(store, Vault(store, master)))
        proxy_logins.ProxyBearers(store, there, tokens, Access(store), door)
        board_logins.BoardBearers(store, here, door)
        door.accept("people", lambda token: own_accounts.recogniser(own, token))

        def given(account: str) -> list[str]:
            return [one.spec.role for one in bindings.of((subject_of(account),))]

        yield House(
            store,
            master,
            door,
            bindings,
            OwnAccounts(store, master, clock, own, door.linked),
            Users(store, master, clock, there, door.linked, lambda account: bool(given(account))),
            People(store, master, clock, here, door.linked, lambda account: next(iter(given(account)), None)),
            {"people": own, "proxies": there, "boards": here},
        )


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path / "s.db", VirtualClock()) as found:
        yield found


async def test_users_of_before_become_accounts_with_their_passwords_ids_and_roles(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with opened(tmp_path / "s.db", clock) as house:
        await house.former("proxies", "u-1", "ann@example.com", PASSWORD, admin=True)
        await house.former("boards", "7", "bea", PASSWORD, admin=True)
        await house.bindings.give("boards-user/7", "viewer", "/tenants/acme", actor="test")
        before = USER_RULES.present(house.store, "u-1"), PERSON_RULES.present(house.store, "7")
    async with opened(tmp_path / "s.db", clock) as house:
        assert await house.migrate() == 2
        assert await house.migrate() == 0, "done once"
        after = USER_RULES.present(house.store, "u-1"), PERSON_RULES.present(house.store, "7")
        assert [one.revision for one in after] == [one.revision for one in before], "they are not written"
        assert await house.store.secret_names("proxies/password/") == []
        assert [one.spec.subject for one in house.bindings.all()] == ["account/bea"]

        outdated = await house.accounts._passwords.stored("bea")  # as it is stored
        tokens = {family: await house.log_in(family, "bea") for family in ("people", "boards")}
        assert await house.accounts._passwords.stored("bea") != outdated, "hashed anew"
        everything = {("boards.admin", BOARDS), ("viewer", "tenant/acme")}
        for family, token in tokens.items():
            assert house.held(token) == everything, family
            assert house.door.recognise(token).subject == "account/bea"
        assert (str(SYSTEM_ADMIN), "") in house.held(await house.log_in("people", "ann@example.com"))


async def test_a_migration_that_was_cut_short_is_gone_on_with(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await house.former("proxies", f"u-{number}", f"ann{number}@example.com", PASSWORD, admin=False)
    transact, seen = house.store.transact, []

    async def once(*args: Any, **named: Any) -> Any:
        seen.append(named["action"])
        if len(seen) > 1:
            raise FleetplaneError("the power went")
        return await transact(*args, **named)

    with monkeypatch.context() as cut:
        cut.setattr(house.store, "transact", once)
        with pytest.raises(FleetplaneError):
            await house.migrate()
    linked = [account_behind(house.store, "proxies", f"u-{number}") for number in range(3)]
    assert [one is not None for one in linked] == [True, False, False]
    assert len(await house.store.secret_names("proxies/password/")) == 2, "each has one, here or there"
    assert await house.migrate() == 2
    for number in range(3):
        await house.log_in("proxies", f"ann{number}@example.com")


async def test_people_who_are_called_the_same_are_not_taken_for_one(house: House) -> None:
    await house.accounts.create(AccountSpec(login="ann@example.com"), OTHER, actor="test")
    await house.bindings.give("account/ann@example.com", "owner", "/", actor="test")
    await house.bindings.give("account/bob", "owner", "/", actor="test")  # in advance, for another
    await house.former("proxies", "u-1", "ann@example.com", PASSWORD, admin=False)
    await house.former("boards", "7", "bob", PASSWORD, admin=False)
    with capture_logs() as events:
        await house.migrate()
    told = {one["wanted"]: one["account"] for one in events if one["event"] == "people.account_qualified"}
    assert told == {"ann@example.com": "ann@example.com-proxies", "bob": "bob-boards"}

    assert house.held(await house.log_in("proxies", "ann@example.com")) == set(), "the one that it was"
    assert house.held(await house.log_in("boards", "bob")) == {("boards.viewer", BOARDS)}
    assert ("owner", "") in house.held(await house.log_in("people", "ann@example.com", OTHER))
    for family, password in (("proxies", OTHER), ("people", PASSWORD), ("boards", PASSWORD)):
        with pytest.raises(Unauthenticated):
            await house.log_in(family, "ann@example.com", password)


async def test_one_name_and_password_logs_in_everywhere_and_ends_everywhere(house: House) -> None:
    await house.accounts.create(AccountSpec(login="zoe"), PASSWORD, actor="test")
    for family in ("proxies", "boards"):
        with pytest.raises(Unauthenticated):  # who holds nothing there is no user of it
            await house.log_in(family, "zoe")
    await house.bindings.give("account/zoe", "operator", "/", actor="test")
    tokens = {family: await house.log_in(family, "zoe") for family in ("people", "proxies", "boards")}
    for token in tokens.values():
        assert house.held(token) == {("operator", "")}
    guest = house.people.by_login("zoe")
    assert guest is not None
    assert (guest.spec.username, guest.spec.role) == ("zoe", "operator")
    with pytest.raises(AlreadyExists):
        await house.people.create(PersonSpec(username="Zoe"), PASSWORD, actor="test")

    await house.bindings.take(house.bindings.all()[0].name, actor="test")
    assert house.held(tokens["boards"]) == set(), "what a guest has by a binding ends with it"
    await house.users.set_password(house.users.by_login("zoe").name, OTHER, actor="test")  # type: ignore[union-attr]
    for token in tokens.values():
        with pytest.raises(Unauthenticated):
            house.door.authenticate(token)
    await house.log_in("boards", "zoe", OTHER)
    await house.accounts.update("zoe", {"disabled": True}, actor="test")
    for family in ("people", "proxies", "boards"):
        with pytest.raises((Unauthenticated, PermissionDenied)):
            await house.log_in(family, "zoe", OTHER)
    await house.accounts.delete("zoe", actor="test")
    assert house.users.by_login("zoe") is None is house.people.by_login("zoe")


async def test_guesses_at_the_logins_of_all_families_are_counted_together(house: House) -> None:
    await house.accounts.create(AccountSpec(login="zoe"), PASSWORD, actor="test")
    await house.bindings.give("account/zoe", "viewer", "/", actor="test")
    for family in ("people", "boards"):
        for _ in range(4):
            with pytest.raises(Unauthenticated):
                await house.log_in(family, "zoe", OTHER)
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await house.log_in("proxies", "zoe", OTHER)
    for family in ("people", "boards", "proxies"):
        with pytest.raises(ResourceExhausted):
            await house.log_in(family, "zoe")
    assert await house.accounts.authenticate("zoe", PASSWORD, address="198.51.100.1"), "from elsewhere"
    await house.accounts.set_password("zoe", OTHER, actor="test")
    await house.log_in("proxies", "zoe", OTHER)


async def test_a_user_who_is_deleted_takes_the_account_along_only_if_it_is_nothing_else(house: House) -> None:
    made = await house.users.create(UserSpec(email="ann@example.com"), PASSWORD, actor="test")
    await house.users.create(UserSpec(email="boss@example.com", is_system_admin=True), PASSWORD, actor="test")
    await house.bindings.give("account/ann@example.com", "viewer", "/", actor="test")
    await house.log_in("boards", "ann@example.com")

    await house.users.delete(made.name, by="", actor="test")
    left = house.store.get(ACCOUNT, SCOPE, "ann@example.com")
    assert left is not None
    assert (left.spec.home, sorted(left.spec.profiles)) == ("", ["boards"]), "it is a user of boards too"
    assert house.held(await house.log_in("boards", "ann@example.com")) == {("viewer", "")}

    bob = await house.users.create(UserSpec(email="bob@example.com"), PASSWORD, actor="test")
    await house.bindings.give("account/bob@example.com", "viewer", "/", actor="test")
    old = await house.log_in("people", "bob@example.com")
    await house.users.delete(bob.name, by="", whole=False, actor="test")
    assert house.held(old) == {("viewer", "")}, "who deleted the user may not decide about the rest"
    await house.accounts.delete("bob@example.com", actor="test")
    await house.users.create(UserSpec(email="bob@example.com"), PASSWORD, actor="test")
    assert house.held(await house.log_in("people", "bob@example.com")) == set(), (
        "nothing is left to a namesake"
    )
    with pytest.raises(Unauthenticated):
        house.door.authenticate(old)


async def test_a_user_who_is_deactivated_is_shut_out_everywhere_or_in_that_family_alone(house: House) -> None:
    for name, role in (("bea", "viewer"), ("boss", "admin")):
        await house.people.create(PersonSpec(username=name, role=role), PASSWORD, actor="test")
    bea = house.people.by_login("bea")
    assert bea is not None
    await house.people.update(bea.name, {"is_active": False}, whole=False, actor="test")
    assert house.held(await house.log_in("people", "bea")) == set(), "without what boards gave"
    await house.people.update(bea.name, {"is_active": True}, actor="test")
    token = await house.log_in("people", "bea")
    assert house.held(token) == {("boards.viewer", BOARDS)}
    await house.people.update(bea.name, {"is_active": False}, actor="test")
    with pytest.raises(Unauthenticated):
        house.door.authenticate(token)
    await house.people.update(bea.name, {"is_active": True}, actor="test")
    await house.log_in("people", "bea")
    await house.accounts.update("bea", {"disabled": True, "disabled_by": ""}, actor="test")
    await house.people.update(bea.name, {"is_active": False}, actor="test")
    await house.people.update(bea.name, {"is_active": True}, actor="test")
    with pytest.raises(Unauthenticated):
        await house.log_in("people", "bea")


async def test_a_person_is_deleted_whole_or_not_at_all(house: House) -> None:
    await house.people.create(PersonSpec(username="ann"), PASSWORD, actor="test")
    await house.bindings.give("account/ann", "viewer", "/", actor="test")
    await house.log_in("proxies", "ann")
    ann = house.users.by_login("ann")
    assert ann is not None

    def own(draft: Draft) -> None:
        draft.put(MEMBERSHIP, "org/o", ann.name, spec=MembershipSpec(role=OrganizationRole.OWNER))

    key = MEMBERSHIP.key("org/o", ann.name)
    await house.store.transact(own, actor="test", action="test", touches=[key])
    with pytest.raises(FleetplaneError, match="last owner"):
        await house.accounts.delete("ann", actor="test")
    assert house.people.by_login("ann") is not None, "nothing of her was deleted"
    await house.store.transact(
        lambda draft: draft.delete(MEMBERSHIP, "org/o", ann.name), actor="test", action="test", touches=[key]
    )
    await house.accounts.delete("ann", actor="test")
    assert house.people.by_login("ann") is None is house.users.by_login("ann")


async def test_who_is_called_as_anothers_address_here_can_log_in(house: House) -> None:
    await house.users.first_administrator(ADMIN_EMAIL, PASSWORD)
    for name in ("admin", "a.b", "a@b"):
        await house.accounts.create(AccountSpec(login=name), OTHER, actor="test")
        await house.bindings.give(subject_of(name), "viewer", "/", actor="test")
        assert house.held(await house.log_in("proxies", name, OTHER)) == {("viewer", "")}
    assert (SYSTEM_ADMIN, "") in house.held(await house.log_in("proxies", ADMIN_EMAIL))
