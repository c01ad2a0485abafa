from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fleetplane.kernel.access import Principal, Role
from fleetplane.kernel.errors import InvalidArgument, Unauthenticated
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

ROLE = Role("edge.admin")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
async def store(tmp_path: Path, clock: VirtualClock) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=clock) as store:
        yield store


@pytest.fixture
async def operators(store: Store, clock: VirtualClock) -> Operators:
    operators = await Operators.load(store, MasterKey(bytes(32), clock), clock)
    await operators.offer_sessions()
    return operators


async def test_a_kept_token_is_its_holder_until_it_is_revoked(operators: Operators) -> None:
    token = await operators.tokens.create("ci", roles=frozenset({ROLE}), scope="tenant/a", actor="local")
    found = operators.authenticate(token)
    assert (found.name, found.roles, found.scope) == ("token/ci", frozenset({ROLE}), "tenant/a")
    assert [record.name for record in operators.tokens.records()] == ["ci"]

    await operators.tokens.revoke("ci", actor="local")
    with pytest.raises(Unauthenticated, match="revoked"):
        operators.authenticate(token)


async def test_a_kept_token_may_end_by_itself(operators: Operators, clock: VirtualClock) -> None:
    token = await operators.tokens.create("brief", roles=frozenset({ROLE}), actor="local", life_seconds=60)
    assert operators.authenticate(token).name == "token/brief"
    await clock.advance(61)
    with pytest.raises(Unauthenticated, match="expired"):
        operators.authenticate(token)


async def test_a_session_says_who_and_ends(operators: Operators, clock: VirtualClock) -> None:
    token = operators.session("local", roles={ROLE}, scope="tenant/a", life_seconds=600)
    found = operators.of_header(f"Bearer {token}")
    assert (found.name, found.roles, found.scope) == ("operator/local", frozenset({ROLE}), "tenant/a")
    await clock.advance(700)
    with pytest.raises(Unauthenticated, match="expired"):
        operators.authenticate(token)


async def test_a_session_of_more_than_a_working_day_is_refused(operators: Operators) -> None:
    with pytest.raises(InvalidArgument):
        operators.session("local", roles={ROLE}, life_seconds=13 * 3600)


async def test_a_session_of_another_server_is_not_believed(
    operators: Operators, tmp_path: Path, clock: VirtualClock
) -> None:
    async with Store.open(StoreSettings(path=tmp_path / "t.db"), kinds=(), clock=clock) as other_store:
        other = await Operators.load(other_store, MasterKey(bytes(32), clock), clock)
        await other.offer_sessions()
        forged = other.session("local", roles={ROLE}, life_seconds=600)
    with pytest.raises(Unauthenticated):
        operators.authenticate(forged)


async def test_where_no_sessions_are_offered_none_is_believed(
    operators: Operators, store: Store, clock: VirtualClock
) -> None:
    token = operators.session("local", roles={ROLE}, life_seconds=600)
    silent = await Operators.load(store, MasterKey(bytes(32), clock), clock)
    with pytest.raises(Unauthenticated):
        silent.authenticate(token)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer  ", "Basic abc", "bearer a.b.c", "Bearer fp_x"]
)
async def test_what_is_no_token_is_nobody(operators: Operators, header: str | None) -> None:
    with pytest.raises(Unauthenticated):
        operators.of_header(header)


async def test_a_revoked_principal_is_refused_with_every_kind_of_token(
    operators: Operators, store: Store, clock: VirtualClock
) -> None:
    kept = await operators.tokens.create("ci", roles=frozenset({ROLE}), actor="local")
    session = operators.session("ann", roles={ROLE}, life_seconds=600)
    revocations = Revocations(store, clock)
    for principal, token in (("token/ci", kept), ("operator/ann", session)):
        operators.of_header(f"Bearer {token}")
        await revocations.revoke(principal=principal, reason="left", actor="local")
        with pytest.raises(Unauthenticated, match="was revoked: left"):
            operators.of_header(f"Bearer {token}")
        await revocations.lift(principal=principal, actor="local")
        assert operators.of_header(f"Bearer {token}").name == principal


async def test_a_token_of_the_process_is_its_principal_until_it_is_revoked_and_means_nothing_elsewhere(
    operators: Operators, store: Store, clock: VirtualClock
) -> None:
    principal = Principal(name="operator/local", roles=frozenset({ROLE}))
    token = operators.in_process(principal)
    await clock.advance(24 * 3600)
    assert operators.of_header(f"Bearer {token}") == principal
    restarted = await Operators.load(store, MasterKey(bytes(32), clock), clock)
    with pytest.raises(Unauthenticated):
        restarted.authenticate(token)
    await Revocations(store, clock).revoke(principal=principal.name, reason="left", actor="local")
    with pytest.raises(Unauthenticated, match="was revoked: left"):
        operators.authenticate(token)
