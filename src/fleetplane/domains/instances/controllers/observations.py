"""What the provider says exists. Looked at as a whole every so often, and singly on suspicion."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import structlog

from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.providers.contract import InstanceGone, ObservedMachine, ProviderError
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

PAGE = 200
PAGES_LIMIT = 10_000
"""Of one list: two million instances, or a provider whose pages lead in circles."""
SETTLING_SECONDS = 30.0
"""How long a fresh instance may be missing from the lists of a provider that is not prompt: they lag
behind creation."""


class MachineObservations:
    def __init__(self, provider: GuardedProvider, clock: Clock) -> None:
        self._provider = provider
        self._clock = clock
        self._seen: dict[str, ObservedMachine] = {}
        self._gone: set[str] = set()
        """Those that the provider was asked about by name and did not have."""
        self._listed_at_ns: int | None = None
        self._heard_since: set[str] = set()
        """Those of whom something is known that is newer than the list that is being read."""
        self._settling_ns = 0 if provider.describe().prompt else round(SETTLING_SECONDS * NS)

    def __repr__(self) -> str:
        return f"<Observations seen={len(self._seen)} gone={len(self._gone)}>"

    def lost(self, instance: Instance) -> bool:
        """Whether the provider has lost the instance, or says that it is on its way out."""
        if instance.name in self._gone:
            return True
        seen = self._seen.get(instance.name)
        if seen is not None:
            return seen.status.unhealthy
        # From the last thing that happened to it, not from its record's beginning: a provider that
        # refused for a while made it only just now.
        settled_ns = instance.updated_at_ns + self._settling_ns
        return self._listed_at_ns is not None and self._listed_at_ns > settled_ns

    def doubtful(self, instance: Instance) -> bool:
        """Whether the last list lacks it, which is no proof yet."""
        if instance.name in self._seen or instance.name in self._gone or self._listed_at_ns is None:
            return False
        return self._listed_at_ns > instance.updated_at_ns and not self.lost(instance)

    def alive(self, instance: Instance) -> bool:
        """Whether a list that was begun after the instance was found gone has it all the same."""
        status = instance.status
        if status is None or status.deleted_at_ns is None or instance.name in self._gone:
            return False
        seen = self._seen.get(instance.name)
        later = self._listed_at_ns is not None and self._listed_at_ns > status.deleted_at_ns
        return later and seen is not None and not seen.status.unhealthy

    def all(self) -> Iterator[ObservedMachine]:
        """What the last list had."""
        return iter(self._seen.values())

    def seen(self, name: str) -> ObservedMachine | None:
        """What the provider last said of an instance, if it did."""
        return self._seen.get(name)

    def word(self, instance: Instance) -> str:
        """What the provider reported last about the instance."""
        seen = self._seen.get(instance.name)
        return str(seen.status) if seen is not None else ""

    def forget(self, name: str) -> None:
        self._heard_since.add(name)
        self._gone.discard(name)
        self._seen.pop(name, None)

    async def look_at(self, instance: Instance) -> str:
        """Ask about one instance; returns the provider's word."""
        provider_id = instance.status.provider_id if instance.status is not None else ""
        try:
            seen = await self._provider.get_instance_status(instance.name, provider_id)
        except InstanceGone:
            self._heard_since.add(instance.name)
            self._gone.add(instance.name)
            self._seen.pop(instance.name, None)
            return "deleted"
        self._heard_since.add(instance.name)
        self._gone.discard(instance.name)
        self._seen[instance.name] = seen
        return str(seen.status)

    async def look_at_all(self, cluster: str, shard: str) -> None:
        """List everything that is ours. A list that breaks off changes nothing.

        Nor does a list change what was learnt of an instance since it was begun.
        """
        began_ns = self._clock.now_ns()
        self._heard_since = set()
        seen: dict[str, ObservedMachine] = {}
        token = ""
        for _ in range(PAGES_LIMIT):
            page = await self._provider.list_instances(cluster, shard, limit=PAGE, next_token=token)
            seen.update((item.instance_id, item) for item in page.items)
            token = page.next_token
            if not token:
                break
        else:
            raise ProviderError(f"the provider's list has no end within {PAGES_LIMIT} pages")
        newer = self._heard_since
        listed = {name: item for name, item in seen.items() if name not in newer}
        self._seen = {**listed, **{name: item for name, item in self._seen.items() if name in newer}}
        self._gone -= listed.keys()
        self._listed_at_ns = began_ns

    async def watch_over(
        self, owner: Callable[[], tuple[str, str, float]], looked: Callable[[], Awaitable[None]]
    ) -> None:
        """Keep looking until cancelled; `owner` gives cluster, shard and the seconds between looks."""
        while True:
            cluster, shard, seconds = owner()
            try:
                await self.look_at_all(cluster, shard)
                await looked()
            except FleetplaneError as error:
                # Nothing is known, which is no reason to act; the next look will tell.
                log.warning("instances.provider_silent", reason=error.reason, error=error.message)
            await self._clock.sleep(seconds)
