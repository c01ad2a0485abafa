"""Subnets without a way out of their own get one, through an instance of their tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.instances.controller_rig import GROUP, Rig, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances import wire
from fleetplane.domains.instances.configuration.schema import Nat
from fleetplane.domains.instances.kinds import HealthReport, Instance
from fleetplane.domains.instances.providers.contract import Description, ProviderCapability
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.rules import nat
from fleetplane.domains.instances.rules.decide import RemovalCause, State
from fleetplane.gen.nstance.v1 import agent_pb2

NAT = "nat"
SMALL, LARGE = "t.small", "t.large"


def routed(size: int = 1, *subnets: str, **changes: Any) -> dict[str, Any]:
    """Workers in private subnets, and a NAT group in a public one."""
    config = wanted(size, subnet_pools={"private": list(subnets or ("net-a",)), "public": ["net-public"]})
    config["templates"][NAT] = {"kind": "nat", "arch": "amd64"}
    config["groups"][TENANT][GROUP]["subnet_pool"] = "private"
    config["groups"][TENANT][NAT] = {"template": NAT, "instance_type": SMALL, "subnet_pool": "public"}
    config["nat"] = {TENANT: {"group": NAT, "instance_type_ladder": [SMALL, LARGE], **changes}}
    return config


def of(place: Rig, group: str, *states: State) -> list[Instance]:
    return [
        one
        for one in place.all()
        if one.spec.group == group
        and rules.state(one)
        in (states or (State.PENDING, State.PROVISIONED, State.REGISTERED, State.DRAINING))
    ]


def ways(place: Rig) -> dict[str, str]:
    """Through which instance each subnet leads."""
    return {
        subnet: route.provider_id.removeprefix("mock-")
        for (subnet, _), route in place.provider.routes.items()
    }


def explained(place: Rig, group: str) -> str:
    found = place.machinery.controller.reconciler.explain(f"{TENANT}/{group}")
    return "" if found is None else " | ".join(reason.message for reason in found.reasons)


async def serving(place: Rig) -> Instance:
    """The first NAT instance, registered, reporting, and carrying the way out."""
    await place.advance(2)
    [carrier] = of(place, NAT)
    await place.register(carrier.name)
    await place.advance(2)
    return carrier


async def test_the_way_out_comes_before_the_first_instance(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(2)) as place:
        await place.advance(2)
        [carrier] = of(place, NAT)
        assert (carrier.spec.serves, carrier.spec.subnet, carrier.spec.instance_type) == (
            "net-a",
            "net-public",
            SMALL,
        )
        assert of(place, GROUP) == [], "nobody is made who could not get out"
        assert explained(place, GROUP) == "net-a has no way out yet: its NAT instance is being made"
        assert place.errors == [], "that is no trouble"

        await place.register(carrier.name)
        await place.advance(8)
        assert ways(place) == {"net-a": carrier.name}
        [route] = place.provider.routes.values()
        assert (route.cluster, route.tenant, route.destination) == ("lab", TENANT, "0.0.0.0/0")
        assert len(of(place, GROUP)) == 2
        assert len(of(place, NAT)) == 1, "one for the subnet, not one for each"


async def test_every_subnet_has_its_own_and_its_own_address(tmp_path: Path) -> None:
    addresses = [{"ipv4": "192.0.2.1"}, {"ipv4": "192.0.2.2"}]
    config = routed(3, "net-a", "net-b", "net-c", public_addresses=addresses)
    async with rig(tmp_path, config) as place:
        for _ in range(6):
            await place.advance(6)
            await place.register()
        held = {one.spec.serves: one.spec.public_ipv4 for one in of(place, NAT)}
        assert held == {"net-a": "192.0.2.1", "net-b": "192.0.2.2"}
        assert {route.public_ipv4 for route in place.provider.routes.values()} == {"192.0.2.1", "192.0.2.2"}
        assert "no public address is left for net-c" in explained(place, NAT)


async def test_a_nat_instance_outlives_its_last_dependent_by_the_grace_period(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1, last_instance_grace_period="2m")) as place:
        carrier = await serving(place)
        await place.advance(6)
        [worker] = of(place, GROUP)
        await place.register(worker.name)
        await place.configure(routed(0, last_instance_grace_period="2m"))
        await place.advance(30)
        assert of(place, GROUP) == []
        assert ways(place) == {"net-a": carrier.name}
        assert "nobody is left in net-a" in explained(place, NAT)
        await place.advance(130)
        assert of(place, NAT) == []
        assert ways(place) == {}, "the way out is taken away before the instance is"
        assert place.machines() == set()


async def test_one_that_is_replaced_stays_until_the_way_leads_through_another(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1)) as place:
        old = await serving(place)
        config = routed(1)
        config["templates"][NAT]["args"] = {"Image": "new"}
        await place.configure(config)
        await place.advance(40)
        [new] = [one for one in of(place, NAT) if one.name != old.name]
        assert place.cause(old.name) == RemovalCause.DRIFT
        assert old.name in place.machines()
        assert ways(place) == {"net-a": old.name}
        assert f"{old.name} drains (config-drift) and stays: the way out of net-a leads" in explained(
            place, NAT
        )

        await place.register(new.name)
        await place.advance(3)
        assert ways(place) == {"net-a": new.name}
        assert old.name not in place.machines()
        [route] = place.provider.routes.values()
        assert route.previous_provider_id == f"mock-{old.name}"


async def test_one_that_is_lost_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1)) as place:
        old = await serving(place)
        place.provider.vanish(old.name)
        await place.advance(12)
        [new] = of(place, NAT)
        await place.register(new.name)
        await place.advance(3)
        assert ways(place) == {"net-a": new.name}


async def test_a_server_that_comes_back_makes_sure_of_the_way(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1)) as place:
        carrier, clock, provider = await serving(place), place.clock, place.provider
    provider.routes.clear()
    async with rig(tmp_path, routed(1), clock=clock, provider=provider) as place:
        await place.advance(2)
        assert ways(place) == {"net-a": carrier.name}


async def test_a_route_that_cannot_be_made_is_explained_and_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1)) as place:
        place.provider.script(MockFault(operation="ensure_nat_route", count=2, error="refused"))
        await serving(place)
        assert "ensure_nat_route failed" in explained(place, NAT)
        await place.advance(15)
        assert len(ways(place)) == 1


async def test_a_loaded_one_gives_way_to_a_larger_and_an_idle_one_to_a_smaller(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1)) as place:
        carrier = await serving(place)
        place.silent.add(carrier.name)

        async def under(name: str, cpu: float, seconds: float) -> None:
            for _ in range(round(seconds / 5)):
                place.reports.take(
                    HealthReport(instance=name, cpu_usage=cpu, conntrack_percent=1.0, dropped_packets=0)
                )
                await place.advance(5)

        await under(carrier.name, 95.0, 500)
        assert [one.spec.instance_type for one in of(place, NAT)] == [SMALL], "not within the cooldown"
        await under(carrier.name, 95.0, 130)
        larger = next(one for one in of(place, NAT) if one.spec.instance_type == LARGE)
        await place.register(larger.name)
        await under(larger.name, 95.0, 5)
        place.silent.add(larger.name)
        assert ways(place) == {"net-a": larger.name}

        await under(larger.name, 5.0, 1620)
        smaller = next(one for one in of(place, NAT) if one.spec.instance_type == SMALL)
        assert smaller.name != carrier.name


async def test_a_tenant_without_nat_and_a_provider_without_routes_need_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, routed(0)) as place:
        lacking = Description(
            name="mock",
            version="1",
            summary="s",
            options={},
            prompt=True,
            capabilities=frozenset(ProviderCapability) - {ProviderCapability.NAT_ROUTES},
        )
        monkeypatch.setattr(place.provider, "describe", lambda: lacking)
        await place.configure(routed(1))
        await place.advance(12)
        assert len(of(place, GROUP)) == 1
        assert of(place, NAT) == []
        assert "has no routes of subnets" in explained(place, NAT)


async def test_a_tenant_that_gives_nat_up_keeps_no_routes(tmp_path: Path) -> None:
    async with rig(tmp_path, routed(1, mode="nat64")) as place:
        await serving(place)
        assert {destination for _, destination in place.provider.routes} == {"64:ff9b::/96"}
        config = routed(1)
        del config["nat"]
        del config["groups"][TENANT][NAT]
        await place.configure(config)
        await place.advance(25)
        assert of(place, NAT) == []
        assert ways(place) == {}


def test_what_a_nat_instance_reports_of_its_load_is_read() -> None:
    metrics = agent_pb2.Metrics(
        cpu_usage=12.5,
        conntrack_count=50,
        conntrack_max=200,
        network_interface=agent_pb2.InterfaceMetrics(rx_drops=3, tx_drops=4),
    )
    body = agent_pb2.HealthReportRequest(instance_id="i", metrics=metrics).SerializeToString()
    seen = nat.load(wire.health_report(body), 7)
    assert seen == nat.NatLoad(at_ns=7, cpu=12.5, conntrack=25.0, dropped=7)
    half = agent_pb2.HealthReportRequest(instance_id="i", metrics=agent_pb2.Metrics(cpu_usage=99.0))
    assert nat.load(wire.health_report(half.SerializeToString()), 7) is None


@pytest.mark.parametrize(
    ("cpu", "conntrack", "dropped", "expected"),
    [
        (81.0, 1.0, 0, nat.Pressure.UP),
        (1.0, 81.0, 0, nat.Pressure.UP),
        (1.0, 1.0, 11, nat.Pressure.UP),
        (30.0, 30.0, 0, nat.Pressure.DOWN),
        (31.0, 30.0, 0, nat.Pressure.NONE),
        (30.0, 30.0, 1, nat.Pressure.NONE),
        (99.0, 99.0, -1, nat.Pressure.NONE),
    ],
)
def test_one_measure_grows_and_all_of_them_shrink(
    cpu: float, conntrack: float, dropped: int, expected: nat.Pressure
) -> None:
    before = nat.NatLoad(at_ns=0, cpu=0.0, conntrack=0.0, dropped=5)
    now = nat.NatLoad(at_ns=10 * 10**9, cpu=cpu, conntrack=conntrack, dropped=5 + dropped)
    assert nat.pressure(before, now, Nat(group=NAT)) is expected
