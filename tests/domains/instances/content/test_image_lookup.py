"""What a name in `images` means is asked of the provider, kept, and explained when it is nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.instances.controller_rig import Rig, rig, wanted

from fleetplane.domains.instances.providers.contract import CreateRequest
from fleetplane.domains.instances.providers.mock.provider import MockFault
from fleetplane.domains.instances.rules.decide import State


def pictured(size: int = 1, *, fallback: str | None = None, **shard: Any) -> dict[str, Any]:
    config = wanted(size, **shard)
    config["images"] = {
        "debian": {
            "provider": "mock",
            "filters": [{"name": "name", "values": ["debian-*"]}],
            "owners": ["self"],
            "sort": "creation-date",
            "order": "desc",
            **({"fallback": fallback} if fallback else {}),
        }
    }
    config["templates"]["worker"]["args"] = {"ImageId": "{{ .Image.debian }}"}
    return config


def booted(place: Rig) -> list[CreateRequest]:
    made: list[CreateRequest] = []
    place.provider.on_create = made.append
    return made


async def test_an_instance_is_made_from_the_image_that_matches_now(tmp_path: Path) -> None:
    async with rig(tmp_path, pictured(0)) as place:
        made = booted(place)
        place.provider.images = {"debian-1": "ami-old", "debian-2": "ami-new", "fedora-9": "ami-other"}
        await place.advance(31)
        await place.configure(pictured(1))
        await place.advance(1)
        assert [request.args for request in made] == [{"ImageId": "ami-new"}]


async def test_an_answer_is_kept_for_its_time_and_then_asked_for_again(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        made = booted(place)
        place.provider.images = {"debian-1": "ami-1"}
        await place.configure(pictured(2, image_refresh_interval="10m"))
        await place.advance(2)
        place.provider.images["debian-2"] = "ami-2"
        await place.configure(pictured(3, image_refresh_interval="10m"))
        await place.advance(1)
        assert [request.args["ImageId"] for request in made] == ["ami-1", "ami-1", "ami-1"]
        assert place.provider.calls["find_image"] == 1
        await place.advance(601)
        await place.configure(pictured(4, image_refresh_interval="10m"))
        await place.advance(1)
        assert made[-1].args["ImageId"] == "ami-2"


async def test_nothing_that_matches_and_no_fallback_is_explained(tmp_path: Path) -> None:
    async with rig(tmp_path, pictured(1)) as place:
        await place.advance(1)
        said = place.explained()["FAILED_PRECONDITION"]
        assert said == "image 'debian': nothing matches its filters"
        [name] = place.names(State.PENDING)
        assert place.provider.calls["create_instance"] == 0
        assert place.instances.get("acme", name).status.last_error == said  # type: ignore[union-attr]

        place.provider.images = {"debian-1": "ami-1"}
        await place.advance(40)
        assert place.machines() == {name}


async def test_a_fallback_stands_in_and_a_known_image_is_not_given_up(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(0)) as place:
        made = booted(place)
        place.provider.script(MockFault(operation="find_image"))
        await place.configure(pictured(1, fallback="ami-fallback", image_refresh_interval="60s"))
        await place.advance(1)
        assert made[-1].args["ImageId"] == "ami-fallback"

        place.provider.images = {"debian-1": "ami-1"}
        await place.advance(95)
        place.provider.script(MockFault(operation="find_image", count=0))
        await place.advance(130)
        await place.configure(pictured(2, fallback="ami-fallback", image_refresh_interval="60s"))
        await place.advance(1)
        images = [request.args["ImageId"] for request in made]
        assert images[-1] == "ami-1", "the last one is better than the fallback"


async def test_an_image_that_nobody_uses_holds_nobody_up(tmp_path: Path) -> None:
    config = pictured(1)
    config["templates"]["worker"]["args"] = {}
    async with rig(tmp_path, config) as place:
        await place.advance(1)
        assert len(place.machines()) == 1
