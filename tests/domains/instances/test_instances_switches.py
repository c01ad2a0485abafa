"""What steers groups beside their size: callers, switches, the provider's own life, great numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.instances.controller_rig import GROUP, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.grpc.operators import _deleting as delete_on_request
from fleetplane.domains.instances.kinds import GROUP as GROUP_KIND
from fleetplane.domains.instances.kinds import TENANT as TENANT_KIND
from fleetplane.domains.instances.kinds import GroupOverride, TenantSleep, tenant_scope
from fleetplane.domains.instances.providers.contract import CreateRequest, ProviderStatus
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.records.tenants import Tenants
from fleetplane.domains.instances.rules.decide import RemovalCause, State
from fleetplane.kernel.freeze import freeze, lift

NS = 1_000_000_000


# On demand


async def test_an_instance_on_demand_ends_at_its_age_and_is_not_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0, expiry={"ondemand_age": "2m"})) as place:
        made = await place.machinery.launcher.create(place.view(), on_demand=True)
        await place.register()
        await place.advance(110)
        assert place.names(State.REGISTERED) == [made.name]
        await place.advance(40)
        assert place.names(State.DELETED) == [made.name]
        assert place.cause(made.name) == RemovalCause.ON_DEMAND_EXPIRY
        assert not place.machines()
        assert place.names() == [made.name]


async def test_a_creation_on_demand_that_failed_does_not_come_true_later(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        place.provider.script(MockFault(operation="create_instance", error="unavailable", after=True))
        with pytest.raises(Exception, match="the answer was lost"):
            await place.machinery.launcher.create(place.view(), on_demand=True)
        await place.advance(10)
        assert not place.machines(), "its caller was told that there is none"
        assert len(place.names(State.DELETED)) == 1


async def test_a_creation_under_an_id_of_the_callers_choice_is_finished_later(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [other] = place.names()
        name = other[:-8] + "zzzzzzz0"
        place.provider.script(MockFault(operation="create_instance", error="unavailable"))
        with pytest.raises(Exception, match="as scripted"):
            await place.machinery.launcher.create(place.view(), name=name, on_demand=True)
        await place.advance(10)
        assert place.machines() == {other, name}


async def test_a_creation_that_overtakes_its_deletion_leaves_no_machine(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        await place.grown(1)
        request: list[CreateRequest] = []
        place.provider.on_create = request.append
        await place.configure(wanted(2))
        await place.advance()
        await place.configure(wanted(0))
        await place.advance(25)
        assert not place.machines()
        # The cloud carries out, late, what it was asked before it was told to delete.
        await place.provider.create_instance(request[0])
        await place.advance(12)
        assert not place.machines(), "a machine that its record says is deleted"


# Switches


@pytest.mark.parametrize("scope", ["", f"tenant/{TENANT}", f"tenant/{TENANT}/group/{GROUP}"])
async def test_a_freeze_stops_growing_replacing_and_draining_and_says_why(tmp_path: Path, scope: str) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        drained, silent = await place.grown(2)
        await place.configure(wanted(1))
        await place.advance()
        await freeze(place.store, scope, reason="migration", actor="ada")
        place.silent.add(silent)
        await place.configure(wanted(5))
        await place.advance(60)
        assert place.machines() == {drained, silent}
        assert place.explained() == {"FROZEN": "automation is frozen: by ada: migration"}

        assert await lift(place.store, scope, actor="ada")
        await place.advance(5)
        assert len(place.machines()) >= 5


async def test_a_freeze_of_another_group_stops_nothing_here(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        await freeze(place.store, f"tenant/{TENANT}/group/others", reason="migration", actor="ada")
        await place.configure(wanted(1))
        await place.advance()
        assert len(place.machines()) == 1


async def test_a_freeze_stops_a_pass_between_two_steps(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:

        async def stop(_request: CreateRequest) -> None:
            if len(place.machines()) == 2:
                await freeze(place.store, reason="enough", actor="ada")

        place.provider.on_create = stop
        await place.configure(wanted(20))
        await place.advance(5)
        assert len(place.machines()) == 2


async def test_a_freeze_that_ends_by_itself_is_over_at_that_moment(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0, health_check_interval="10m")) as place:
        end_ns = place.clock.now_ns() + 30 * NS
        await freeze(place.store, reason="migration", actor="ada", expires_at_ns=end_ns)
        await place.configure(wanted(1, health_check_interval="10m"))
        await place.advance(29)
        assert not place.machines()
        await place.advance(2)
        assert len(place.machines()) == 1


async def test_what_people_ask_for_goes_on_in_a_freeze(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        await freeze(place.store, reason="migration", actor="ada")
        await place.instances.step(TENANT, name, delete_on_request, action="delete", actor="operator")
        await place.advance(2)
        assert not place.machines(), "deleted as asked, not replaced"


async def test_a_sleeping_tenant_has_no_instances_until_it_wakes(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        wake_at_ns = place.clock.now_ns() + 100 * NS
        await Tenants(place.store).sleep(TENANT, wake_at_ns, actor="operator")
        await place.advance(25)
        assert place.names(State.DELETED) == [name]
        assert place.explained()["ASLEEP"] == f"tenant {TENANT} sleeps: no instance is wanted"
        await place.advance(70)
        assert not place.machines()
        await place.advance(6)
        assert len(place.machines()) == 1
        assert not place.instances.sleep(TENANT).asleep


async def test_a_sleep_that_was_prolonged_is_not_ended_at_its_old_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        later_ns = place.clock.now_ns() + 1000 * NS
        await Tenants(place.store).sleep(TENANT, later_ns, actor="operator")
        # Decided on what it saw a moment ago, when the sleep was over.
        over = TenantSleep(asleep=True, wake_at_ns=1)
        with monkeypatch.context() as outdated:
            outdated.setattr(place.instances, "sleep", lambda _tenant: over)
            await place.instances.wake_if_due(TENANT, place.clock.now_ns())
        found = place.store.get(TENANT_KIND, tenant_scope(TENANT), TENANT)
        assert found is not None
        assert found.spec == TenantSleep(asleep=True, wake_at_ns=later_ns)


# The provider


@pytest.mark.parametrize("error", ["unavailable", "crash"])
async def test_a_provider_that_cannot_list_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        names = await place.grown(2)
        if error == "crash":

            async def broken(*_arguments: Any, **_rest: Any) -> Any:
                raise KeyError("a defect of the provider")

            monkeypatch.setattr(place.provider, "list_instances", broken)
        else:
            place.provider.script(MockFault(operation="list_instances", count=0))
        await place.advance(120)
        assert place.names(State.REGISTERED) == names
        await place.configure(wanted(3))
        await place.advance()
        assert len(place.machines()) == 3, "the controller is still at work"


async def test_what_vanished_is_made_anew_without_a_drain(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        await place.advance(31)
        place.provider.vanish(name)
        await place.advance(11)
        assert place.names(State.DELETED) == [name]
        assert place.cause(name) == RemovalCause.PROVIDER_LOST
        assert len(place.machines()) == 1


async def test_a_machine_in_no_record_is_told_and_left_alone(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        stray = CreateRequest(
            cluster="lab", shard="local", tenant=TENANT, group=GROUP, instance_id="wkr-stray"
        )
        await place.provider.create_instance(stray)
        await place.advance(60)
        assert "wkr-stray" in place.machines()
        text = "the provider has mock-wkr-stray (wkr-stray), which is in no record"
        assert (TENANT, GROUP, "wkr-stray", text) in place.errors
        assert place.explained()["ORPHAN"] == "exists at the provider and in no record"


async def test_an_agent_that_went_away_makes_its_instance_be_looked_at(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1, health_check_interval="10m")) as place:
        [name] = await place.grown(1)
        place.silent.add(name)
        place.machinery.suspect(place.instances.get(TENANT, name))
        place.provider.vanish(name)
        place.provider.script(MockFault(operation="get_instance_status"))  # and does not answer at first
        await place.advance(5)
        assert place.names(State.REGISTERED) == [name], "no answer is no reason to act"
        await place.advance(10)
        assert place.cause(name) == RemovalCause.PROVIDER_LOST
        assert len(place.machines()) == 1


async def test_an_instance_whose_agent_came_back_is_not_asked_about(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1, health_check_interval="10m")) as place:
        [name] = await place.grown(1)
        place.machinery.suspect(place.instances.get(TENANT, name))
        calls = place.provider.calls["get_instance_status"]
        await place.advance(60)
        assert place.provider.calls["get_instance_status"] == calls
        assert not place.machinery._rechecks


async def test_a_slow_deletion_is_asked_for_once_and_then_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)

        async def slowly(instance_id: str, _provider_id: str) -> None:
            place.provider.calls["delete_instance"] += 1
            place.provider.set_status(instance_id, ProviderStatus.DELETING)

        monkeypatch.setattr(place.provider, "delete_instance", slowly)
        await place.configure(wanted(0))
        await place.advance(40)
        assert place.names(State.DELETING) == [name]
        assert place.provider.calls["delete_instance"] == 1
        assert place.provider.calls["get_instance_status"] <= 12, "every two seconds"
        place.provider.vanish(name)
        await place.advance(3)
        assert place.names(State.DELETED) == [name]


async def test_one_slow_group_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    config = wanted(0)
    config["groups"][TENANT]["others"] = {"template": "worker", "size": 0}
    async with rig(tmp_path, config) as place:
        place.provider.script(MockFault(operation="create_instance", delay_seconds=3600, error=""))
        config["groups"][TENANT][GROUP]["size"] = 1
        await place.configure(config)
        for _ in range(50):
            await place.clock.advance(0.01)
        config["groups"][TENANT]["others"]["size"] = 1
        await place.configure(config)
        async with asyncio.timeout(60):
            while not place.machines():
                await place.clock.advance(0.01)
                await asyncio.sleep(0.002)  # what goes to the disk takes its time by another clock
        assert place.clock.monotonic() < 3600
        await place.clock.advance(3700)


# Many


async def test_a_thousand_changes_at_once_are_a_few_passes(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(200)) as place:
        await place.grown(200)
        await place.advance(1)
        before = place.machinery.controller.reconciler.statistics().passes
        for turn in range(5):
            for one in place.all():
                await place.instances.step(TENANT, one.name, _version(f"v{turn}"), action="agent_version")
        await place.advance(2)
        assert place.machinery.controller.reconciler.statistics().passes - before <= 10


def _version(text: str) -> Any:
    return lambda status, _now_ns: msgspec.structs.replace(status, agent_version=text)


async def test_the_story_of_many_waiting_instances_is_short(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(50)) as place:
        await place.grown(50)
        await place.configure(wanted(0))
        await place.advance()
        found = place.machinery.controller.reconciler.explain(f"{TENANT}/{GROUP}")
        assert found is not None
        assert len(found.reasons) == 33
        assert found.reasons[-1].message == "and as many more: 18 WAITING"


async def test_an_override_changes_the_size_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        scope = tenant_scope(TENANT)
        await place.store.transact(
            lambda draft: draft.put(GROUP_KIND, scope, GROUP, spec=GroupOverride(template="worker", size=2)),
            actor="operator",
            action="test",
            touches=[GROUP_KIND.key(scope, GROUP)],
        )
        await place.advance()
        assert len(place.machines()) == 2
