"""When many instances fall silent at once, the fault is probably not theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.instances.controller_rig import GROUP, rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.metrics import InstanceCollector
from fleetplane.domains.instances.rules.decide import RemovalCause, State

REPORTS = "10s"
SILENT_SECONDS = 31.0
"""Three reports missed."""


async def test_a_group_that_falls_silent_together_is_left_alone_and_explained(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(4)) as place:
        names = await place.grown(4)
        place.silent.update(names[:3])
        await place.advance(SILENT_SECONDS)
        assert place.names(State.REGISTERED) == names
        text = "3 of 4 instances of this group fell silent together: they are left alone for now"
        assert place.explained()["WAITING"] == text
        assert place.errors.count((TENANT, GROUP, "", text)) == 1, "told once, however many passes there are"
        assert place.machinery.controller.held == 3
        collector = InstanceCollector(
            place.instances, place.groups, place.reports, lambda: place.machinery.controller.held
        )
        counted = {metric.name: metric.samples[0].value for metric in collector.collect()}
        assert counted["fleetplane_instances_held"] == 3
        for name in names[:3]:
            status = place.instances.get(TENANT, name).status
            assert status is not None
            assert status.unhealthy_since_ns is not None


async def test_the_first_of_many_is_held_although_the_others_are_only_late(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(4)) as place:
        names = await place.grown(4)
        for name in names:  # reports of one outage are spread over an interval
            place.silent.add(name)
            await place.advance(3)
        await place.advance(20)
        assert place.machinery.controller.held == 1
        await place.advance(10)
        assert place.machinery.controller.held == 4
        assert place.names(State.REGISTERED) == names


async def test_those_who_are_heard_again_are_well_again(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(4)) as place:
        names = await place.grown(4)
        place.silent.update(names)
        await place.advance(SILENT_SECONDS)
        assert place.machinery.controller.held == 4
        place.silent.clear()
        await place.advance(11)
        assert place.names(State.REGISTERED) == names
        assert place.machinery.controller.held == 0
        assert place.explained() == {}
        statuses = [one.status for one in place.all()]
        assert [status.unhealthy_since_ns for status in statuses if status] == [None] * 4


async def test_a_silence_that_lasts_is_ended_one_at_a_time(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(3)) as place:
        names = await place.grown(3)
        place.silent.update(names)
        await place.advance(900)
        assert place.names(State.REGISTERED) == names
        await place.advance(45)
        assert len(place.names(State.DRAINING)) == 1
        assert place.cause(place.names(State.DRAINING)[0]) == RemovalCause.UNHEALTHY
        assert "one at a time" in " ".join(place.explained().values())


async def test_a_few_are_replaced_as_ever(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(5)) as place:
        names = await place.grown(5)
        place.silent.update(names[:2])
        await place.advance(SILENT_SECONDS)
        assert place.names(State.DRAINING) == names[:2]
        assert place.machinery.controller.held == 0


async def test_what_the_provider_has_lost_is_replaced_whatever_else_is_silent(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(4)) as place:
        names = await place.grown(4)
        place.silent.update(names)
        place.provider.vanish(names[0])
        await place.advance(SILENT_SECONDS + 10)
        assert place.names(State.DELETED) == [names[0]]
        assert len(place.machines()) == 4
        assert set(names[1:]) <= set(place.names(State.REGISTERED))


async def test_one_of_a_group_is_held_when_most_of_the_tenant_is_silent(tmp_path: Path) -> None:
    config = wanted(1)
    config["groups"][TENANT] = {name: {"template": "worker", "size": 3} for name in ("one", "two")}
    async with rig(tmp_path, config) as place:
        names = await place.grown(6)
        first = [one.name for one in place.all() if one.spec.group == "one"]
        place.silent.update({*names} - {*first[1:]})
        await place.advance(SILENT_SECONDS + 1)
        assert place.names(State.REGISTERED) == names
        found = place.machinery.controller.reconciler.explain(f"{TENANT}/one")
        assert found is not None
        assert "4 of 6 instances of this tenant fell silent together" in found.reasons[0].message


@pytest.mark.parametrize("size", [1, 2])
async def test_a_group_of_one_or_two_is_held_like_any_other(tmp_path: Path, size: int) -> None:
    async with rig(tmp_path, wanted(size)) as place:
        names = await place.grown(size)
        place.silent.update(names)
        await place.advance(SILENT_SECONDS + 1)
        assert place.names(State.REGISTERED) == names
        assert f"{size} of {size} instances of this group" in place.explained()["WAITING"]
        place.provider.vanish(names[0])  # an answer of the provider is no silence
        await place.advance(12)
        assert names[0] in place.names(State.DELETED)


async def test_the_share_is_a_setting_and_one_never_holds(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(4), silence_share=1.0) as place:
        names = await place.grown(4)
        place.silent.update(names)
        await place.advance(SILENT_SECONDS)
        assert place.names(State.DRAINING) == names


async def test_nobody_who_comes_back_after_a_restart_is_drained_for_the_time_between(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(4)) as place:
        names, clock, provider = await place.grown(4), place.clock, place.provider
    async with rig(tmp_path, wanted(4), clock=clock, provider=provider) as place:
        place.silent.update(names)  # not one of them finds the new server
        await place.advance(SILENT_SECONDS)
        assert place.names(State.REGISTERED) == names
        assert place.machinery.controller.held == 4
