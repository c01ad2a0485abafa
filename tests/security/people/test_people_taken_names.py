"""Whoever takes a name for a while takes nothing from those who hold something at it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from fleetplane.domains.boards.inventory.clusters import Clusters
from fleetplane.domains.boards.kinds import KINDS as BOARD_KINDS
from fleetplane.domains.boards.kinds import ClusterSpec, number_of
from fleetplane.domains.proxies.kinds.records import KINDS as PROXY_KINDS
from fleetplane.domains.proxies.kinds.records import OrganizationSpec, WorkspaceSpec
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.organizations import TenancyPlaces
from fleetplane.kernel.access import Role
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.kernel.identity import MasterKey, OneTimeTokens
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

ACTOR = "user/prowler"


async def test_who_is_called_as_another_for_a_while_ends_nothing_of_theirs(tmp_path: Path) -> None:
    clock = VirtualClock()
    kinds = (*KERNEL_KINDS, *PROXY_KINDS, *BOARD_KINDS)
    async with Store.open(StoreSettings(path=tmp_path / "s.db"), kinds=kinds, clock=clock) as store:
        master = MasterKey(bytes(32), clock)
        tokens, bindings = OneTimeTokens(store, master, clock), Bindings(store)
        places, clusters = (
            TenancyPlaces(store, clock, Workspaces(store, Vault(store, master))),
            Clusters(store),
        )
        own = await places.create_organization(OrganizationSpec(name="O", slug="own"), owner="", actor=ACTOR)
        shop = await places.create_workspace(own.name, WorkspaceSpec(name="W", slug="w"), actor=ACTOR)
        cluster = await clusters.create(ClusterSpec(name="mine"), actor=ACTOR)

        async def as_organization(slug: str) -> None:
            await places.update_organization(own.name, {"slug": slug}, if_match=None, actor=ACTOR)

        async def as_workspace(slug: str) -> None:
            await places.update_workspace(shop.scope, {"slug": slug}, if_match=None, actor=ACTOR)

        async def as_cluster(name: str) -> None:
            await clusters.update(number_of(cluster), actor=ACTOR, name=name)

        async def given(subject: str, path: str) -> None:
            await clock.advance(1.0)
            await bindings.give(subject, "operator", path, actor="owner")
            await clock.advance(1.0)

        taking: list[tuple[str, str, str, Callable[[str], Awaitable[None]]]] = [
            ("/tenants/victim", "victim", "own", as_organization),
            ("/tenants/own/workspaces/prod", "prod", "w", as_workspace),
            ("/tenants/default/clusters/theirs", "theirs", "mine", as_cluster),
        ]
        await clock.advance(1.0)
        token = await tokens.create(
            "ci", roles=frozenset({Role("viewer")}), scope="tenant/victim", actor="owner"
        )
        for path, theirs, before, called in taking:
            await given("account/ann", path)
            await called(theirs)
            await given("account/ben", path)
            await called(before)
            assert [one.spec.subject for one in bindings.all()] == ["account/ann"], path
            await bindings.forget("account/ann", actor="owner")
        tokens.authenticate(token)
        meanwhile = await tokens.create(
            "late", roles=frozenset({Role("viewer")}), scope="tenant/own", actor="owner"
        )
        await clock.advance(1.0)
        await as_organization("other")
        with pytest.raises(Unauthenticated):
            tokens.authenticate(meanwhile)
