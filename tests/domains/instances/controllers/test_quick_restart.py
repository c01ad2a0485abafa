"""A server that comes back knows within one look what is still there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.instances.controller_rig import rig, wanted
from support.instances.instances_lab import TENANT

from fleetplane.domains.instances.providers.mock.provider import MockFault, MockProvider
from fleetplane.domains.instances.rules.decide import RemovalCause, State


def lagging(provider: MockProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cloud: lists lag behind creation, so that being absent from one proves nothing at once."""
    described = provider.describe()
    monkeypatch.setattr(provider, "describe", lambda: replace(described, prompt=False))


@pytest.mark.parametrize("prompt", [True, False])
async def test_machines_that_ended_with_the_server_are_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: bool
) -> None:
    async with rig(tmp_path, wanted(3)) as place:
        names, clock, provider = await place.grown(3), place.clock, place.provider
    for name in names:
        provider.vanish(name)
    if not prompt:
        lagging(provider, monkeypatch)
    await clock.advance(1)
    async with rig(tmp_path, wanted(3), clock=clock, provider=provider) as place:
        await place.advance(2)
        assert place.names(State.DELETED) == names
        assert {place.cause(name) for name in names} == {RemovalCause.PROVIDER_LOST}
        assert len(place.machines()) == 3


async def test_a_provider_whose_lists_are_prompt_is_believed_about_what_never_came(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name], clock, provider = place.names(State.PROVISIONED), place.clock, place.provider
    provider.vanish(name)
    await clock.advance(1)
    async with rig(tmp_path, wanted(1), clock=clock, provider=provider) as place:
        await place.advance(2)
        assert place.names(State.DELETED) == [name]
        assert len(place.machines()) == 1


async def test_machines_that_outlived_the_server_are_kept(tmp_path: Path) -> None:
    async with rig(tmp_path, wanted(3)) as place:
        names, clock, provider = await place.grown(3), place.clock, place.provider
    async with rig(tmp_path, wanted(3), clock=clock, provider=provider) as place:
        await place.advance(2)
        assert place.names(State.REGISTERED) == names
        assert place.machines() == set(names)
        assert place.explained() == {}


async def test_what_a_cloud_does_not_show_yet_is_given_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        [name] = place.names(State.PROVISIONED)  # its agent has not come: nothing proves that it was there
        clock, provider = place.clock, place.provider
    lagging(provider, monkeypatch)
    kept = provider.instances[name]
    provider.vanish(name)
    await clock.advance(1)
    async with rig(tmp_path, wanted(1), clock=clock, provider=provider) as place:
        await place.advance(2)
        assert place.names(State.PROVISIONED) == [name]
        provider._put(kept)
        await place.advance(30)
        assert place.names(State.PROVISIONED) == [name]


async def test_a_provider_that_cannot_say_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig(tmp_path, wanted(1)) as place:
        names, clock, provider = await place.grown(1), place.clock, place.provider
    lagging(provider, monkeypatch)
    kept = provider.instances[names[0]]
    provider.vanish(names[0])
    provider.script(MockFault(operation="get_instance_status", count=0))
    await clock.advance(1)
    async with rig(tmp_path, wanted(1), clock=clock, provider=provider) as place:
        await place.advance(5)
        assert place.names(State.REGISTERED) == names
        provider.heal()
        provider._put(kept)
        await place.advance(30)
        assert place.names(State.REGISTERED) == names
        assert place.instances.get(TENANT, names[0]).status is not None
