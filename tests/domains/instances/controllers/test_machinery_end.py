"""What is left of a provider's machinery once it was told to end: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from support.instances.controller_rig import rig, wanted

from fleetplane.domains.instances.providers.contract import ProviderContext, ProviderPage
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.sim.clock import VirtualClock


class LeavingProvider(MockProvider):
    """Hangs in a list once it is told to, and notes when that list and the provider itself are ended."""

    hung: asyncio.Event | None = None
    list_ended: Callable[[], None]
    closed: Callable[[], None] = staticmethod(lambda: None)

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        if self.hung is not None:
            self.hung.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.list_ended()
        return await super().list_instances(cluster, shard, limit=limit, next_token=next_token)

    async def close(self) -> None:
        self.closed()
        await super().close()


async def test_machinery_that_ends_leaves_no_watch_and_no_agent_that_goes_then_is_in_its_way(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    provider = LeavingProvider(ProviderContext(clock=clock, state_directory=tmp_path / "mock"))
    watches: list[int] = []
    failures: list[Exception] = []
    async with rig(tmp_path, wanted(size=1), clock=clock, provider=provider) as place:
        [instance] = place.instances.all()

        def agent_goes() -> None:
            try:
                place.machinery.suspect(instance)
            except Exception as error:
                failures.append(error)

        provider.list_ended = agent_goes
        provider.closed = lambda: watches.append(place.store.statistics().watchers)
        provider.hung = asyncio.Event()
        async with asyncio.timeout(60):
            while not provider.hung.is_set():
                await clock.advance(1.0)
                await asyncio.sleep(0)
    assert failures == []
    assert watches == [0]


class StartingProvider(MockProvider):
    """Is never done with starting."""

    closed = False

    def __init__(self, context: ProviderContext) -> None:
        super().__init__(context)
        self.starting = asyncio.Event()

    async def start(self) -> None:
        self.starting.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True
        await super().close()


async def test_a_provider_that_is_still_starting_when_the_machinery_ends_is_closed(tmp_path: Path) -> None:
    clock = VirtualClock()
    provider = StartingProvider(ProviderContext(clock=clock, state_directory=tmp_path / "mock"))
    async with rig(tmp_path, wanted(size=0), clock=clock, provider=provider):
        async with asyncio.timeout(60):
            await provider.starting.wait()
        assert not provider.closed
    assert provider.closed
