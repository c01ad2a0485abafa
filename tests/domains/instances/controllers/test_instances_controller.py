"""Groups are kept as configured: every rule with its hands, a provider and time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.instances.controller_rig import COLLECTION, GROUP, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.kinds import HealthReport
from fleetplane.domains.instances.providers.contract import ProviderStatus
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.rules.decide import RemovalCause, State

NS = 1_000_000_000


# Growing


async def test_creations_keep_the_rate_and_the_wait_is_explained(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(3, create_rate_limit="10s")) as place:
        assert len(place.machines()) == 1
        assert place.explained()["RATE_LIMITED"].startswith("next creation in")
        await place.advance(9)
        assert len(place.machines()) == 1
        await place.advance(1.5)
        assert len(place.machines()) == 2
        await place.advance(10)
        assert len(place.machines()) == 3


async def test_instances_spread_over_the_subnets_that_have_room(tmp_path: Path) -> None:
    config = wanted(4, subnet_pools={"pool": ["net-a", "net-b", "net-full"]})
    config["groups"][TENANT][GROUP]["subnet_pool"] = "pool"
    config["groups"][TENANT][GROUP]["size"] = 0
    async with rig(tmp_path, config) as place:
        place.provider.fill_subnet("net-full")
        config["groups"][TENANT][GROUP]["size"] = 4
        await place.configure(config)
        await place.advance(2)
        subnets = sorted(one.spec.subnet for one in place.all())
        assert subnets == ["net-a", "net-a", "net-b", "net-b"]

        place.provider.fill_subnet("net-a")
        place.provider.fill_subnet("net-b")
        config["groups"][TENANT][GROUP]["size"] = 5
        await place.configure(config)
        await place.advance()
        assert place.explained()["RESOURCE_EXHAUSTED"] == "no subnet of pool 'pool' has room"


async def test_a_quota_is_told_explained_and_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        place.provider.configure({"max_instances": 2})
        await place.configure(wanted(3))
        await place.advance(2)
        assert len(place.machines()) == 2
        text = "mock: 2 instances are all there may be"
        assert place.explained() == {"PROVIDER_QUOTA_EXHAUSTED": text}
        [pending] = place.names(State.PENDING)
        assert (TENANT, GROUP, pending, text) in place.errors

        place.provider.configure({"max_instances": 0})
        await place.advance(6)
        assert place.machines() == set(place.names())
        assert len(place.machines()) == 3


async def test_a_machine_that_cannot_be_deleted_does_not_keep_the_group_from_growing(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [stuck] = await place.grown(1)
        place.provider.script(MockFault(operation="delete_instance", count=0, error="refused"))
        place.provider.set_status(stuck, ProviderStatus.STOPPED)
        await place.advance(12)
        assert len(place.names(State.PROVISIONED)) == 1, "its replacement is there"
        assert place.names(State.DELETING) == [stuck]
        assert place.explained()["PROVIDER_REFUSED"] == "mock: delete_instance failed, as scripted"


async def test_an_instance_that_was_made_late_is_not_taken_for_lost(tmp_path: Path) -> None:
    patient = {"garbage_collection": {**COLLECTION, "registration_timeout": "1h"}}
    async with rig(tmp_path, wanted(0, **patient)) as place:
        place.provider.script(MockFault(operation="create_instance", count=0, error="quota"))
        await place.configure(wanted(1, **patient))
        await place.advance(45)  # far longer than lists may lag behind a creation
        place.provider.heal()
        # A list that began before the machine was there, and ends after: it cannot have it.
        place.provider.script(MockFault(operation="list_instances", after=True, delay_seconds=8, error=""))
        await place.advance(40)
        assert len(place.names()) == 1
        assert place.machines() == set(place.names(State.PROVISIONED))


# Shrinking


async def test_a_smaller_size_drains_the_oldest_first_with_notice(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(3, create_rate_limit="1s")) as place:
        oldest, middle, youngest = await place.grown(3)
        await place.configure(wanted(1))
        await place.advance()
        assert place.names(State.DRAINING) == [oldest, middle]
        assert place.machines() == {oldest, middle, youngest}, "nobody goes without notice"
        assert "no acknowledgement yet" in place.explained()["WAITING"]

        await place.instances.acknowledge(TENANT, middle, actor="operator")
        await place.advance()
        assert place.machines() == {oldest, youngest}
        await place.advance(20)
        assert place.machines() == {youngest}
        assert sorted(place.gone) == sorted([oldest, middle])


async def test_what_was_not_made_yet_is_dropped_first_and_never_made(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [serving] = await place.grown(1)
        place.provider.script(MockFault(operation="create_instance", count=0, error="quota"))
        await place.configure(wanted(2))
        await place.advance()
        [pending] = place.names(State.PENDING)
        calls = place.provider.calls["create_instance"]
        await place.configure(wanted(1))
        await place.advance(2)
        assert place.names(State.REGISTERED) == [serving]
        assert place.names(State.DELETED) == [pending]
        assert place.provider.calls["create_instance"] == calls


async def test_a_group_that_is_gone_drains_everything_on_demand_too(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        await place.grown(2)
        await place.machinery.launcher.create(place.view(), on_demand=True)
        await place.register()
        config = wanted()
        config["groups"] = {}
        await place.configure(config)
        await place.advance()
        assert len(place.names(State.DRAINING)) == 3
        assert {place.cause(name) for name in place.names()} == {RemovalCause.GROUP_DELETED}
        await place.advance(21)
        assert not place.machines()
        await place.advance(3601)
        assert place.names() == []
        assert place.machinery.controller._decided_seconds == {}


async def test_drains_and_their_deadlines_survive_a_restart(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        kept, clock, provider = await place.grown(2), place.clock, place.provider
        await place.configure(wanted(0))
        await place.advance(15)
        assert place.names(State.DRAINING) == kept
        deadline = place.all()[0].status
        await place.instances.acknowledge(TENANT, kept[0], actor="operator")
    async with rig(tmp_path, wanted(0), clock=clock, provider=provider) as place:
        await place.advance()
        assert place.machines() == {kept[1]}, "acknowledged before, deleted after"
        assert deadline is not None
        status = place.instances.get(TENANT, kept[1]).status
        assert status is not None
        assert status.drain == deadline.drain
        await place.advance(10)
        assert not place.machines()


async def test_a_record_is_purged_with_its_keys_after_its_retention(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        await place.instances.keep_keys(TENANT, name, {"kubelet": "pem"}, actor="agent")
        await place.configure(wanted(0))
        await place.advance(25)
        assert place.names(State.DELETED) == [name]
        await place.advance(3560)
        assert place.names(State.DELETED) == [name]
        await place.advance(60)
        assert place.names() == []
        assert place.instances.keys(TENANT, name, ["kubelet"]) == {}
        assert place.reports.last(name) is None


# Replacing


async def test_drift_replaces_one_at_a_time_oldest_first(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(3, create_rate_limit="1s")) as place:
        before = await place.grown(3)
        config = wanted(3)
        config["templates"]["worker"]["args"] = {"Image": "new"}
        await place.configure(config)
        for turn, name in enumerate(before):
            await place.advance(1)
            assert place.names(State.DRAINING) == [name]
            assert place.cause(name) == RemovalCause.DRIFT
            assert len(place.machines()) == 4
            await place.register()
            await place.instances.acknowledge(TENANT, name, actor="operator")
            await place.advance(1)
            assert len(place.names(State.DELETED)) == turn + 1
        await place.advance(30)
        assert not place.names(State.DRAINING)
        assert len(place.machines()) == 3


async def test_without_a_replacement_a_drained_instance_is_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [old] = await place.grown(1)
        place.provider.script(MockFault(operation="create_instance", count=0, error="quota"))
        config = wanted(1)
        config["templates"]["worker"]["args"] = {"Image": "new"}
        await place.configure(config)
        await place.advance(40)
        assert old in place.machines(), "it still works, and nothing can take its place"
        said = place.explained()
        assert said["WAITING"] == f"{old} is drained and stays until its replacement exists"
        assert "PROVIDER_QUOTA_EXHAUSTED" in said

        place.provider.heal()
        await place.advance(8)
        assert old not in place.machines()
        assert len(place.machines()) == 1


@pytest.mark.parametrize(
    ("age", "cause"), [("eligible", RemovalCause.ELIGIBLE_EXPIRY), ("forced", RemovalCause.FORCED_EXPIRY)]
)
async def test_old_instances_are_replaced_at_their_age(tmp_path: Path, age: str, cause: RemovalCause) -> None:
    async with rig(tmp_path, wanted(1, expiry={f"{age}_age": "5m"})) as place:
        [old] = await place.grown(1)
        await place.advance(290)
        assert place.names(State.REGISTERED) == [old]
        await place.advance(15)
        assert place.names(State.DRAINING) == [old]
        assert place.cause(old) == cause
        assert len(place.machines()) == 2


async def test_a_silent_instance_is_replaced_and_a_talking_one_is_not(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        silent, talking = await place.grown(2)
        place.silent.add(silent)
        await place.advance(31)
        assert place.names(State.DRAINING) == [silent]
        assert place.cause(silent) == RemovalCause.UNHEALTHY
        assert talking in place.names(State.REGISTERED)
        assert len(place.machines()) == 3


async def test_an_instance_that_registers_in_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = place.names(State.PROVISIONED)
        step = place.instances.step

        async def registering_first(tenant: str, instance: str, change: Any, **rest: Any) -> Any:
            if rest["action"] == "deleting":
                await place.register(instance)
            return await step(tenant, instance, change, **rest)

        monkeypatch.setattr(place.instances, "step", registering_first)
        await place.advance(62)
        assert place.names(State.REGISTERED) == [name]
        assert place.machines() == {name}


async def test_an_instance_that_never_registers_is_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = place.names(State.PROVISIONED)
        await place.advance(62)
        assert place.names(State.DELETED) == [name]
        assert place.cause(name) == RemovalCause.NEVER_REGISTERED
        assert len(place.machines()) == 1


async def test_a_spot_notice_without_an_answer_ends_at_its_deadline(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        place.silent.add(name)
        deadline = place.clock.now_ns() + 5 * NS
        place.reports.take(
            HealthReport(instance=name, termination_action="terminate", termination_deadline_ns=deadline)
        )
        place.machinery.controller.look_at(TENANT, GROUP)
        await place.advance(1)
        assert place.cause(name) == RemovalCause.SPOT
        assert len(place.machines()) == 2
        await place.advance(5)
        assert name not in place.machines()
