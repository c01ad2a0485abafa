"""The leader's address is where the server is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.instances.controller_rig import Rig, rig, wanted

from fleetplane.domains.instances.controllers.leader_address import KEY
from fleetplane.domains.instances.providers.mock.provider import MockFault

NETWORK = {"ip": "10.0.0.100", "interface_id": "eni-1"}


def led(**shard: Any) -> dict[str, Any]:
    return wanted(0, **shard)


def explained(place: Rig) -> str:
    found = place.machinery.leader.reconciler.explain(KEY)
    return "" if found is None else " ".join(reason.message for reason in found.reasons) + found.last_error


async def test_the_address_comes_here_and_is_kept_here(tmp_path: Path) -> None:
    async with rig(tmp_path, led(leader_network=NETWORK), machine="i-me") as place:
        await place.advance(1)
        assert place.provider.leaders == {"10.0.0.100": "i-me"}
        place.provider.leaders["10.0.0.100"] = "i-other"
        await place.advance(61)
        assert place.provider.leaders == {"10.0.0.100": "i-me"}
        provider, clock = place.provider, place.clock
    assert provider.leaders == {"10.0.0.100": "i-me"}, "a restart costs nobody the address"
    async with rig(tmp_path, led(), provider=provider, clock=clock, machine="i-me") as place:
        await place.advance(1)
        assert explained(place) == ""


async def test_an_address_that_is_no_longer_named_is_given_up(tmp_path: Path) -> None:
    async with rig(tmp_path, led(leader_network=NETWORK), machine="i-me") as place:
        await place.advance(1)
        await place.configure(led(leader_network={"ip": "10.0.0.200"}))
        await place.advance(1)
        assert place.provider.leaders == {"10.0.0.200": "i-me"}
        await place.configure(led())
        await place.advance(1)
        assert place.provider.leaders == {}


async def test_a_failure_is_explained_and_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, led(), machine="i-me") as place:
        place.provider.script(MockFault(operation="assign_leader_network", count=2))
        await place.configure(led(leader_network=NETWORK))
        await place.advance(0.5)
        assert "assign_leader_network failed" in explained(place)
        await place.advance(5)
        assert place.provider.leaders == {"10.0.0.100": "i-me"}
        assert explained(place) == ""


async def test_a_server_that_does_not_know_its_machine_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path, led(leader_network=NETWORK)) as place:
        await place.advance(1)
        assert explained(place) == "which machine this is must be said in the setting instances.machine"
        assert place.provider.leaders == {}
