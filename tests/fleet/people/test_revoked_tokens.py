"""What was given to a token ends with it, also if whoever revoked it left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.kernel.leaving import leave_while_written

from fleetplane.fleet.people.rest.tokens import TokenRoutes
from fleetplane.fleet.people.tokens_service import OperatorsService
from fleetplane.gen.fleetplane.admin.v1 import operators_pb2 as pb
from fleetplane.kernel.access import Role
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

CLOCK = VirtualClock()
ROLE = Role("edge.admin")
Revoke = Callable[[Operators, Bindings], Coroutine[Any, Any, Any]]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=KERNEL_KINDS, clock=CLOCK) as store:
        yield store


def by_socket(operators: Operators, bindings: Bindings) -> Coroutine[Any, Any, Any]:
    service = OperatorsService(operators, roles=[ROLE], bindings=bindings)
    context: Any = SimpleNamespace(principal=SimpleNamespace(name="local"))
    return service.RevokeToken(pb.RevokeTokenRequest(name="ci"), context)


def by_rest(operators: Operators, bindings: Bindings) -> Coroutine[Any, Any, Any]:
    parts: Any = SimpleNamespace(
        operators=operators,
        bindings=bindings,
        door=SimpleNamespace(tree=SimpleNamespace(path=lambda _: "/")),
        rights=SimpleNamespace(roles=frozenset[str]()),
        check_at=lambda *_: None,
    )
    call: Any = SimpleNamespace(path={"name": "ci"}, caller=SimpleNamespace(name="local", principal=None))
    return cast("Coroutine[Any, Any, Any]", TokenRoutes(parts).revoke_token(call))


@pytest.mark.parametrize("revoke", [by_socket, by_rest])
async def test_another_token_of_its_name_inherits_nothing_although_whoever_revoked_it_left(
    store: Store, revoke: Revoke
) -> None:
    operators, bindings = await Operators.load(store, MasterKey(bytes(32), CLOCK), CLOCK), Bindings(store)
    await operators.tokens.create("ci", roles=frozenset({ROLE}), actor="local")
    await bindings.give("token/ci", str(ROLE), "/tenants/acme", actor="local")
    await leave_while_written(store, revoke(operators, bindings))
    assert not operators.tokens.records()
    assert bindings.all() == []
