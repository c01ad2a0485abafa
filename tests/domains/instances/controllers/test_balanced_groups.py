"""Instances stand behind their group's load balancers while they serve, and never longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.instances.controller_rig import GROUP, Rig, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.providers.contract import ProviderCapability
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.rules.decide import State

ARN = "arn:aws:elasticloadbalancing:us-west-2:123412341234:targetgroup/www/abc"


def balanced(size: int = 1, *keys: str, **shard: Any) -> dict[str, Any]:
    config = wanted(size, **shard)
    group = {"arn": ARN, "listener_port": 443, "target_port": 8443, "proxy_port": 18443}
    config["load_balancers"] = {
        key: {"provider": "aws", "target_groups": [group]} for key in keys or ("www",)
    }
    config["groups"][TENANT][GROUP]["load_balancers"] = list(keys or ("www",))
    return config


def behind(place: Rig, key: str = "www") -> list[str]:
    return sorted(one.removeprefix("mock-") for one in place.provider.targets[key])


def attachments(place: Rig, name: str) -> list[str]:
    status = place.instances.get(TENANT, name).status
    assert status is not None
    return sorted(status.balancers)


async def test_an_instance_goes_in_with_its_first_report_and_not_before(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1, "www", "internal")) as place:
        [name] = place.names(State.PROVISIONED)
        place.silent.add(name)
        await place.register()
        await place.advance(2)
        assert behind(place) == []
        place.silent.clear()
        await place.advance(11)
        assert behind(place) == behind(place, "internal") == [name]
        assert attachments(place, name) == ["internal", "www"]
        calls = place.provider.calls["register_with_lb"]
        await place.advance(60)
        assert place.provider.calls["register_with_lb"] == calls, "once is enough"


async def test_a_draining_instance_is_out_before_it_is_gone(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(2, create_rate_limit="1s")) as place:
        old, young = await place.grown(2)
        await place.advance(2)
        assert behind(place) == sorted([old, young])
        config = balanced(1)
        await place.configure(config)
        await place.advance(1)
        assert place.names(State.DRAINING) == [old]
        assert behind(place) == [young], "no new connections from the moment it drains"
        assert old in place.machines()
        await place.advance(25)
        assert place.machines() == {young}


async def test_connections_may_end_before_the_instance_does_but_not_for_ever(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        [name] = await place.grown(1)
        await place.advance(2)
        place.provider.ending.add(f"mock-{name}")
        await place.configure(balanced(0))
        await place.advance(1)
        await place.instances.acknowledge(TENANT, name, actor="operator")
        await place.advance(5)
        assert name in place.machines(), "acknowledged, but traffic is still on it"
        assert "load balancer www still ends its connections" in place.explained()["WAITING"]
        await place.advance(20)
        assert place.machines() == set(), "its time was up"


async def test_a_load_balancer_that_fails_is_told_and_asked_again(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        place.provider.script(MockFault(operation="register_with_lb", count=0, error="refused"))
        [name] = await place.grown(1)
        await place.advance(7)
        text = "mock: register_with_lb failed, as scripted"
        assert place.explained()["PROVIDER_REFUSED"] == text
        assert (TENANT, GROUP, name, text) in place.errors
        status = place.instances.get(TENANT, name).status
        assert status is not None
        assert status.last_error == text
        place.provider.heal()
        await place.advance(7)
        assert behind(place) == [name]
        status = place.instances.get(TENANT, name).status
        assert status is not None
        assert status.last_error == ""


async def test_nothing_is_deleted_that_could_not_be_taken_out(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        [name] = await place.grown(1)
        await place.advance(2)
        place.provider.script(MockFault(operation="deregister_from_lb", count=0))
        await place.configure(balanced(0))
        await place.advance(60)
        assert place.machines() == {name}
        assert place.explained()["PROVIDER_ERROR"] == "mock: deregister_from_lb failed, as scripted"
        place.provider.heal()
        await place.advance(10)
        assert place.machines() == set()
        assert behind(place) == []


@pytest.mark.parametrize("operation", ["register_with_lb", "deregister_from_lb"])
async def test_a_server_that_ends_in_the_middle_is_finished_by_the_next(
    tmp_path: Path, operation: str
) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        clock, provider = place.clock, place.provider
        [name] = await place.grown(1)
        if operation == "deregister_from_lb":
            await place.advance(2)
        # Done there, and the answer lost: the record says less than is true.
        place.provider.script(MockFault(operation=operation, count=0, after=True))
        await place.configure(balanced(0 if operation == "deregister_from_lb" else 1))
        await place.advance(1)
        assert attachments(place, name) == ["www"]
    provider.heal()
    size = 0 if operation == "deregister_from_lb" else 1
    async with rig(tmp_path, balanced(size), clock=clock, provider=provider) as place:
        await place.advance(30)
        assert behind(place) == ([] if size == 0 else [name])
        assert place.machines() == (set() if size == 0 else {name})


async def test_whoever_was_taken_out_by_hand_is_put_back(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        [name] = await place.grown(1)
        await place.advance(2)
        place.provider.targets["www"].clear()
        await place.advance(25)
        assert behind(place) == [name]


async def test_a_load_balancer_that_the_document_drops_is_left_and_a_new_one_joined(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        [name] = await place.grown(1)
        await place.advance(2)
        assert behind(place) == [name]
        await place.configure(balanced(1, "other"))
        await place.advance(3)
        assert behind(place) == []
        assert behind(place, "other") == [name]
        config = balanced(1, "other")
        config["load_balancers"]["other"]["target_groups"][0]["target_port"] = 9443
        await place.configure(config)
        await place.advance(6)
        status = place.instances.get(TENANT, name).status
        assert status is not None
        assert [target.target_port for target in status.balancers["other"].targets] == [9443]
        assert place.provider.calls["deregister_from_lb"] == 2
        assert behind(place, "other") == [name]


async def test_a_freeze_holds_load_balancers_too(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        [name] = place.names(State.PROVISIONED)
        await place.freeze("looking into something")
        await place.register(name)
        await place.advance(15)
        assert behind(place) == []


async def test_a_provider_without_load_balancers_says_so_and_serves_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        described = place.provider.describe()
        lacking = type(described)(
            name="mock",
            version="1",
            summary="s",
            options={},
            capabilities=frozenset(ProviderCapability) - {ProviderCapability.LOAD_BALANCERS},
        )
        monkeypatch.setattr(place.provider, "describe", lambda: lacking)
        await place.grown(1)
        await place.advance(2)
        assert place.explained()["LOAD_BALANCER"] == "the provider 'mock' has no load balancers"
        await place.configure(balanced(0))
        await place.advance(25)
        assert place.machines() == set()


async def test_an_instance_that_the_load_balancer_no_longer_knows_is_out(tmp_path: Path) -> None:
    async with rig(tmp_path, balanced(1)) as place:
        [name] = await place.grown(1)
        await place.advance(2)
        assert behind(place) == [name]
        place.provider.script(MockFault(operation="deregister_from_lb", count=0, error="gone"))
        place.provider.vanish(name)
        await place.advance(12)
        assert place.names(State.DELETED) == [name]
        assert attachments(place, name) == []


async def test_a_tunnel_is_explained(tmp_path: Path) -> None:
    config = balanced(1)
    config["load_balancers"]["www"] = {
        "provider": "tunnel",
        "listeners": [{"target_port": 1, "proxy_port": 2}],
    }
    config["tunnels"] = {
        "www": {"image": "t@sha256:" + "0" * 64, "readiness_url": "http://127.0.0.1:1/ready"}
    }
    async with rig(tmp_path, config) as place:
        await place.grown(1)
        await place.advance(1)
        assert place.explained()["LOAD_BALANCER"] == (
            "load balancer www is a tunnel, and this server runs none"
        )
