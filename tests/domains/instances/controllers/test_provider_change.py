"""A document that names another provider, or the same with other options, while the server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.instances.controller_rig import wanted
from support.instances.instances_lab import document, until
from support.shared.plain_domain import PlainDomain, plain_domain

from fleetplane.domains.instances.configuration import parse
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.kernel.errors import InvalidArgument


def at(size: int = 0, *, provider: str = "mock", zone: str = "here-a", **options: Any) -> dict[str, Any]:
    infra = {"provider": provider, "region": "here", "zone": zone, "options": options}
    return document(size, shard={"infra": infra})


async def settled(place: PlainDomain, size: int) -> None:
    def enough() -> bool:
        found = [one for one in place.instances() if rules.state(one) is not rules.State.DELETED]
        return len(found) == size and all(one.status and one.status.provider_id for one in found)

    await until(enough)


async def test_other_options_come_into_force_without_a_restart(tmp_path: Path) -> None:
    async with plain_domain(tmp_path, at(1, state_file="m.jsonl")) as place:
        await settled(place, 1)
        first = place.provider()
        await place.configure(at(2, state_file="m.jsonl", max_instances=1))
        await until(lambda: place.provider() not in (None, first))
        await until(lambda: len(place.instances()) == 2)
        [known] = [one for one in place.instances() if one.status and one.status.provider_id]
        second = place.provider()
        assert second is not None
        await until(lambda: known.name in second.instances)  # what the first one made is still there
        assert sorted(place.explanations()) == [
            "instances/groups",
            "instances/leader-network",
            "instances/provider",
        ]


async def test_another_provider_is_refused_while_instances_exist_at_the_old_one(tmp_path: Path) -> None:
    async with plain_domain(tmp_path, at(2, state_file="m.jsonl")) as place:
        await settled(place, 2)
        with pytest.raises(
            InvalidArgument, match="2 instances exist at provider 'mock'; with 'local'"
        ) as refused:
            await place.configure(at(2, provider="local"))
        assert "scale their groups to 0 first" in refused.value.message
        with pytest.raises(InvalidArgument, match="2 instances exist in zone 'here-a'"):
            await place.configure(at(2, zone="here-b", state_file="m.jsonl"))
        assert place.domain._groups.required().shard.infra.zone == "here-a", "nothing has changed"

        await place.configure(at(0, state_file="m.jsonl"))
        await settled(place, 0)
        await place.configure(at(0, provider="local"))
        await until(lambda: place.kind() == "local")


async def test_a_provider_that_forgets_is_not_replaced_under_its_instances(tmp_path: Path) -> None:
    async with plain_domain(tmp_path, at(1)) as place:
        await settled(place, 1)
        with pytest.raises(InvalidArgument, match="1 instances end with provider 'mock'"):
            await place.configure(at(1, max_instances=5))


async def test_a_mistake_in_the_options_is_told_whatever_else_speaks_against_the_change(
    tmp_path: Path,
) -> None:
    async with plain_domain(tmp_path, at(1)) as place:
        await settled(place, 1)
        with pytest.raises(
            InvalidArgument, match="has no option 'max_instance'; did you mean 'max_instances'"
        ):
            await place.configure(at(1, max_instance=5))


async def test_what_works_is_not_given_up_for_what_cannot_be_had(tmp_path: Path) -> None:
    async with plain_domain(tmp_path, at(0, state_file="m.jsonl")) as place:
        await until(lambda: place.kind() == "mock")
        with pytest.raises(InvalidArgument, match="has no option 'delay'"):
            await place.configure(at(0, delay=1))
        with pytest.raises(InvalidArgument, match="which are installed, not 'google'"):
            await place.configure(at(0, provider="google"))
        assert place.kind() == "mock"


async def test_a_restart_does_not_leave_instances_behind_either(tmp_path: Path) -> None:
    async with plain_domain(tmp_path, at(1, state_file="m.jsonl")) as place:
        await settled(place, 1)
    async with plain_domain(tmp_path, at(1, provider="local")) as place:
        assert place.domain._groups.configuration is None, "refused, and said so in the log"


def test_any_installed_provider_may_be_named() -> None:
    config = wanted(1)
    config["shard"]["infra"]["provider"] = "acme"
    text = str(config).replace("'", '"')
    assert parse(text, name="x", providers={"acme"}).shard.infra.provider == "acme"
    with pytest.raises(InvalidArgument, match=r"must be one of acme2, which are installed, not 'acme'"):
        parse(text, name="x", providers={"acme2"})
