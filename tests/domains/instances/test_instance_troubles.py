"""What went wrong with an instance is in its record, until it has gone right."""

from __future__ import annotations

from pathlib import Path

from controller_rig import Rig, rig, wanted
from instances_lab import TENANT

from fleetplane.domains.instances import wire
from fleetplane.domains.instances.kinds import InstanceStatus
from fleetplane.domains.instances.providers.mock import Fault
from fleetplane.domains.instances.rules import State


def status_of(place: Rig, name: str) -> InstanceStatus:
    status = place.instances.get(TENANT, name).status
    assert status is not None
    return status


async def test_an_instance_that_cannot_be_made_says_why_until_it_is(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        place.provider.script(Fault(operation="create_instance", count=0, error="quota"))
        await place.configure(wanted(1))
        await place.advance(1)
        [name] = place.names(State.PENDING)
        assert status_of(place, name).last_error == "mock: create_instance failed, as scripted"
        revision = place.instances.get(TENANT, name).revision
        await place.advance(12)
        assert place.instances.get(TENANT, name).revision == revision, "the same error is written once"
        place.provider.heal()
        await place.advance(6)
        assert status_of(place, name).last_error == ""


async def test_an_instance_that_cannot_be_deleted_says_why(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = await place.grown(1)
        place.provider.script(Fault(operation="delete_instance", count=0, error="refused"))
        await place.configure(wanted(0))
        await place.advance(25)
        assert status_of(place, name).last_error == "mock: delete_instance failed, as scripted"


async def test_operators_are_told_since_when_an_instance_is_unhealthy(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(2)) as place:
        silent, _ = await place.grown(2)
        heard = place.reports.last(silent)
        assert heard is not None
        place.silent.add(silent)
        await place.advance(35)
        assert place.names(State.DRAINING) == [silent]
        since_ns = status_of(place, silent).unhealthy_since_ns
        assert since_ns == heard.at_ns + 30 * 10**9
        event = wire.instance_event(place.instances.get(TENANT, silent), "pending_deletion")
        assert event.unhealthy_at.ToNanoseconds() == since_ns
