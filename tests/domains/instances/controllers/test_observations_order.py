"""What the provider said last about an instance counts, not what arrived last."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.instances.controller_rig import rig, wanted

from fleetplane.domains.instances.providers.contract import ProviderContext, ProviderPage
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.sim.clock import VirtualClock


class SlowLists(MockProvider):
    """A list that is long on its way, once that is wanted."""

    slow = False

    def __init__(self, context: ProviderContext) -> None:
        super().__init__(context)
        self.made, self.arrives = asyncio.Event(), asyncio.Event()

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        found = await super().list_instances(cluster, shard, limit=limit, next_token=next_token)
        if self.slow:
            self.made.set()
            await self.arrives.wait()
        return found


async def test_a_list_of_before_does_not_bring_back_what_was_found_gone_since(tmp_path: Path) -> None:
    clock = VirtualClock()
    provider = SlowLists(ProviderContext(clock=clock, state_directory=tmp_path / "mock"))
    async with rig(tmp_path, wanted(size=1), clock=clock, provider=provider) as place, asyncio.timeout(60):
        observations = place.machinery.observations
        [instance] = place.instances.all()
        assert instance.status is not None
        provider.slow = True
        configuration = place.groups.required()
        looking = asyncio.create_task(
            observations.look_at_all(configuration.cluster.id, configuration.shard.id)
        )
        await provider.made.wait()
        await provider.delete_instance(instance.name, instance.status.provider_id)
        while await observations.look_at(instance) != "deleted":
            await clock.advance(1.0)
        assert observations.lost(instance)
        provider.slow = False
        provider.arrives.set()
        await looking
        assert observations.lost(instance)
        assert observations.seen(instance.name) is None
