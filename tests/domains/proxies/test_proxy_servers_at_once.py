"""Two servers on one database change the same organisation or workspace at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from support.shared.virtual_loop import run
from support.shared.virtual_servers import virtual_servers

from fleetplane.domains.proxies.agents.ports import NobodyThere
from fleetplane.domains.proxies.agents.registry import Agents
from fleetplane.domains.proxies.kinds.records import (
    AGENT,
    CERTIFICATE,
    CONFIG_VERSION,
    MEMBERSHIP,
    ORGANIZATION,
    UPSTREAM,
    VIRTUAL_HOST,
    WORKSPACE,
    CertificateSpec,
    OrganizationSpec,
    UpstreamSpec,
    VirtualHostSpec,
    WorkspaceSpec,
    organization_scope,
)
from fleetplane.domains.proxies.kinds.values import (
    Algorithm,
    Location,
    NamedAgents,
    OrganizationRole,
    UpstreamServer,
)
from fleetplane.domains.proxies.server import BLUEPRINT
from fleetplane.domains.proxies.serving.certificates import Certificates
from fleetplane.domains.proxies.serving.hosts import Hosts
from fleetplane.domains.proxies.serving.private_keys import Vault
from fleetplane.domains.proxies.serving.workspaces import Workspaces
from fleetplane.domains.proxies.tenancy.members import Members, is_owner
from fleetplane.domains.proxies.tenancy.organizations import TenancyPlaces
from fleetplane.domains.proxies.tenancy.quotas import QuotaOptions, Quotas
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store

ROUNDS = 12
ACTOR = "test"


@dataclass
class Site:
    """What REST of one server writes with."""

    store: Store

    def __post_init__(self) -> None:
        store, clock = self.store, self.store.clock
        vault = Vault(store, MasterKey(b"k" * 32, clock))
        self.workspaces = Workspaces(store, vault)
        self.places = TenancyPlaces(store, clock, self.workspaces)
        self.members = Members(store, self.workspaces)
        self.hosts = Hosts(store, clock, self.workspaces)
        self.agents = Agents(store, clock, self.workspaces, NobodyThere())
        self.certificates = Certificates(store, clock, self.workspaces, vault)
        self.quotas = Quotas(store, QuotaOptions(agents_per_organization=3))

    async def place(self, slug: str, *, owner: str = "") -> tuple[str, str]:
        """An organisation and the scope of a workspace in it."""
        made = await self.places.create_organization(
            OrganizationSpec(name="Org", slug=slug), owner=owner, actor=ACTOR
        )
        workspace = await self.workspace(made.name, slug)
        return made.name, workspace.scope

    async def workspace(self, organization: str, slug: str) -> Any:
        spec = WorkspaceSpec(name="Ws", slug=slug)
        return await self.places.create_workspace(organization, spec, actor=ACTOR)


def _both(work: Callable[[Site, Site], Awaitable[None]]) -> None:
    async def servers() -> None:
        async with virtual_servers([*KERNEL_KINDS, *BLUEPRINT.kinds]) as servers:
            stores = [(await servers.start(name)).store for name in ("one", "two")]
            await work(*(Site(store) for store in stores))

    run(servers())


async def _at_once(*works: Awaitable[Any]) -> list[Any]:
    """What each gave, or the refusal that it raised."""
    found = await asyncio.gather(*works, return_exceptions=True)
    for one in found:
        assert not isinstance(one, BaseException) or isinstance(one, FleetplaneError), repr(one)
    return found


def _refused(found: Iterable[Any]) -> list[str]:
    return [one.reason for one in found if isinstance(one, FleetplaneError)]


def _host(name: str, **given: Any) -> VirtualHostSpec:
    upstream = given.pop("upstream", None)
    location = Location(path="/", upstream_id=upstream) if upstream else Location(path="/", root="/srv")
    return VirtualHostSpec(
        name=name, server_name=f"{name}.example.com", listen_port=80, locations=(location,), **given
    )


async def _known(site: Site) -> None:
    await site.store.confirmed()


def test_an_organization_is_deleted_or_gets_a_workspace_never_both() -> None:
    async def work(one: Site, two: Site) -> None:
        outcomes = set()
        for number in range(ROUNDS):
            made = await one.places.create_organization(
                OrganizationSpec(name="Org", slug=f"org{number}"), owner="", actor=ACTOR
            )
            await _known(two)
            first, second = (one, two) if number % 2 else (two, one)
            found = await _at_once(
                first.places.delete_organization(made.name, if_match=None, actor=ACTOR),
                second.workspace(made.name, "ws"),
            )
            assert len(_refused(found)) == 1, found
            for site in (one, two):
                await _known(site)
                scope = organization_scope(made.name)
                there = site.store.get(ORGANIZATION, scope, made.name) is not None
                assert there == bool(site.store.count(WORKSPACE, scope))
            outcomes.add(there)
        assert outcomes == {True, False}, "either may be first"

    _both(work)


def test_a_workspace_is_deleted_or_gets_an_agent_or_a_host_never_both() -> None:
    async def work(one: Site, two: Site) -> None:
        for number in range(ROUNDS):
            _, scope = await one.place(f"place{number}")
            await _known(two)
            first, second = (one, two) if number % 2 else (two, one)
            wanted = (
                second.agents.enrol(scope, "web-1", {}, hours=1, actor=ACTOR)
                if number % 4 < 2
                else second.hosts.create(scope, _host("www"), actor=ACTOR)
            )
            found = await _at_once(first.places.delete_workspace(scope, if_match=None, actor=ACTOR), wanted)
            assert len(_refused(found)) == 1, found
            await _known(one)
            there = one.store.get(WORKSPACE, scope, scope.rpartition("/")[2]) is not None
            inside = one.store.count(AGENT, scope) + one.store.count(VIRTUAL_HOST, scope)
            assert (there, inside) in ((True, 1), (False, 0))
            assert there == bool(one.store.count(CONFIG_VERSION, scope))

    _both(work)


def test_hosts_that_are_made_at_once_share_the_numbers_of_versions() -> None:
    async def work(one: Site, two: Site) -> None:
        _, scope = await one.place("place")
        await _known(two)
        found = await _at_once(
            *(
                site.hosts.create(scope, _host(f"{name}{number}"), actor=ACTOR)
                for number in range(ROUNDS)
                for name, site in (("a", one), ("b", two))
            )
        )
        assert _refused(found) == [], found
        for site in (one, two):
            await _known(site)
            versions = [one.spec for one in site.store.list(CONFIG_VERSION, scope)]
            assert [spec.version for spec in versions] == list(range(1, 2 * ROUNDS + 2))
            assert len(versions[-1].virtual_hosts) == 2 * ROUNDS, "nobody's host was left out"

    _both(work)


def test_a_name_that_is_served_at_one_server_is_refused_at_the_other() -> None:
    async def work(one: Site, two: Site) -> None:
        for number in range(ROUNDS):
            _, scope = await one.place(f"place{number}")
            await _known(two)
            found = await _at_once(
                *(site.hosts.create(scope, _host("www"), actor=ACTOR) for site in (one, two))
            )
            assert len(_refused(found)) == 1, found
            await _known(one)
            assert one.store.count(VIRTUAL_HOST, scope) == 1

    _both(work)


def test_an_upstream_is_deleted_or_referred_to_never_both() -> None:
    async def work(one: Site, two: Site) -> None:
        for number in range(ROUNDS):
            _, scope = await one.place(f"place{number}")
            spec = UpstreamSpec(
                name="app", algorithm=Algorithm.ROUND_ROBIN, servers=(UpstreamServer(address="10.0.0.1:80"),)
            )
            upstream = await one.hosts.upstreams.create(scope, spec, actor=ACTOR)
            await _known(two)
            first, second = (one, two) if number % 2 else (two, one)
            found = await _at_once(
                first.hosts.upstreams.delete(scope, upstream.name, if_match=None, actor=ACTOR),
                second.hosts.create(scope, _host("www", upstream=upstream.name), actor=ACTOR),
            )
            assert len(_refused(found)) == 1, found
            await _known(one)
            assert one.store.count(UPSTREAM, scope) == one.store.count(VIRTUAL_HOST, scope)

    _both(work)


def test_an_agent_is_deleted_or_named_never_both() -> None:
    async def work(one: Site, two: Site) -> None:
        for number in range(ROUNDS):
            _, scope = await one.place(f"place{number}")
            agent = (await one.agents.enrol(scope, "web-1", {}, hours=1, actor=ACTOR)).agent
            await _known(two)
            target = NamedAgents(agent_ids=(agent.name,))
            first, second = (one, two) if number % 2 else (two, one)
            found = await _at_once(
                first.agents.delete(scope, agent.name, if_match=None, actor=ACTOR),
                second.hosts.create(scope, _host("www", target_agents=target), actor=ACTOR),
            )
            assert len(_refused(found)) == 1, found
            await _known(one)
            assert one.store.count(AGENT, scope) == one.store.count(VIRTUAL_HOST, scope)

    _both(work)


def test_the_last_owner_stays_although_two_servers_remove_one_each() -> None:
    async def work(one: Site, two: Site) -> None:
        for number in range(ROUNDS):
            organization, _ = await one.place(f"place{number}", owner="ann")
            owner = OrganizationRole.OWNER
            await one.members.add(organization, "bob", owner, by=owner, consented=True, actor=ACTOR)
            await _known(two)
            found = await _at_once(
                one.members.remove(organization, "bob", by=owner, actor=ACTOR),
                two.members.remove(organization, "ann", by=owner, actor=ACTOR),
            )
            assert len(_refused(found)) == 1, found
            await _known(one)
            left = one.store.list(MEMBERSHIP, organization_scope(organization))
            assert [is_owner(member) for member in left] == [True]

    _both(work)


def test_a_quota_holds_for_all_servers_together() -> None:
    async def work(one: Site, two: Site) -> None:
        organization, scope = await one.place("place")
        await _known(two)
        found = await _at_once(
            *(
                site.agents.enrol(scope, f"{name}{number}", {}, hours=1, actor=ACTOR)
                for number in range(3)
                for name, site in (("a", one), ("b", two))
            )
        )
        assert len(_refused(found)) == 3, found
        await _known(one)
        assert one.store.count(AGENT, organization_scope(organization)) == 3

    _both(work)


def test_a_certificate_of_one_domain_is_asked_for_once() -> None:
    async def work(one: Site, two: Site) -> None:
        _, scope = await one.place("place")
        await _known(two)
        spec = CertificateSpec(domain="example.com", provider="letsencrypt", auto_renew=True)
        found = await _at_once(*(site.certificates.request(scope, spec, actor=ACTOR) for site in (one, two)))
        assert len(_refused(found)) == 1, found
        await _known(one)
        assert one.store.count(CERTIFICATE, scope) == 1

    _both(work)
