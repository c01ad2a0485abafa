"""Provider and controller: the part that can only run once a configuration is in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import structlog

from fleetplane.domains.instances.content.downloads import Downloads
from fleetplane.domains.instances.content.files import FileMaker, ServerAddresses
from fleetplane.domains.instances.content.images import Images
from fleetplane.domains.instances.controllers.balancers import Balancers
from fleetplane.domains.instances.controllers.groups import GroupController
from fleetplane.domains.instances.controllers.launcher import InstanceLauncher
from fleetplane.domains.instances.controllers.leader_address import LeaderAddress
from fleetplane.domains.instances.controllers.nat import NatKeeper
from fleetplane.domains.instances.controllers.observations import MachineObservations
from fleetplane.domains.instances.controllers.plan_steps import ErrorSink, GroupParts
from fleetplane.domains.instances.controllers.provider_guard import GuardedProvider
from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.providers.contract import Provider
from fleetplane.domains.instances.records.groups import Groups
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.intents import Intents
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.reconcile import Explanation, Reconciler
from fleetplane.kernel.store import Store
from fleetplane.kernel.values.times import NS

log = structlog.get_logger(__name__)

START_RETRY = Backoff(first_seconds=1.0, ceiling_seconds=60.0)
"""Between tries at a provider that cannot be had or does not start."""
IMAGES_SECONDS = 60.0
"""Between looks at which images are due to be looked up; for how long each is good is configured."""
RECHECKS_LIMIT = 1024
"""Instances asked about at a time because their agents went away; the regular look finds the rest."""


class ProviderStarts:
    """What the tries to have and to start a provider came to; it explains every group while they fail."""

    name = "instances/provider"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: Explanation | None = None

    def __repr__(self) -> str:
        return f"<ProviderStarts failures={self._last.failures if self._last else 0}>"

    async def failed(self, error: Exception) -> None:
        """Report the provider's error, and wait before the next try."""
        failures = self._last.failures if self._last is not None else 0
        wait, now = START_RETRY.delay_seconds(failures, jitter=self._clock.random()), self._clock.now_ns()
        text = error.message if isinstance(error, FleetplaneError) else f"{type(error).__name__}: {error}"
        self._last = Explanation(
            key="",
            at_ns=now,
            reasons=(),
            next_due_ns=now + round(wait * NS),
            failures=failures + 1,
            last_error=text,
        )
        log.error("instances.provider_unusable", error=text, retry_seconds=round(wait, 1))
        await self._clock.sleep(wait)

    def succeeded(self) -> None:
        self._last = None

    def explain(self, key: str) -> Explanation | None:
        return None if self._last is None else msgspec.structs.replace(self._last, key=key)

    def explanations(self) -> Iterator[Explanation]:
        if self._last is not None:
            yield self._last


class Machinery:
    def __init__(
        self,
        *,
        store: Store,
        instances: Instances,
        groups: Groups,
        reports: InstanceReports,
        files: FileMaker,
        provider: Provider,
        nonces: SigningKeys,
        authority: Authority,
        addresses: Callable[[], ServerAddresses],
        images: Images,
        downloads: Downloads,
        machine: str = "",
        clock: Clock,
        complain: ErrorSink,
        gone: Callable[[Instance], None],
    ) -> None:
        """`machine` is the provider's id of the machine that this server runs on, if that matters."""
        self.provider = provider
        self._guarded = guarded = GuardedProvider(
            provider, change_seconds=lambda: groups.required().shard.request_timeout_seconds
        )
        self.observations = MachineObservations(guarded, clock)
        nat = NatKeeper(guarded, instances, groups, reports, clock)
        self.intents = Intents(
            instances, groups, nonces, clock, provider_kind=lambda _configuration: provider.kind
        )
        self.launcher = InstanceLauncher(
            instances=instances,
            groups=groups,
            provider=guarded,
            intents=self.intents,
            authority=authority,
            files=files,
            addresses=addresses,
            images=images,
            downloads=downloads,
            nat=nat,
            clock=clock,
        )
        self.leader = LeaderAddress(guarded, groups, store, clock, machine=machine)
        self.controller = GroupController(
            GroupParts(
                store=store,
                instances=instances,
                groups=groups,
                reports=reports,
                provider=guarded,
                observations=self.observations,
                launcher=self.launcher,
                balancers=Balancers(guarded, instances, groups, clock),
                nat=nat,
                clock=clock,
                complain=complain,
                gone=gone,
            )
        )
        self._clock = clock
        self._groups = groups
        self._images = images
        self._rechecks: set[str] = set()
        self._tasks: Boundary | None = None

    def __repr__(self) -> str:
        return f"<Machinery {self.provider.kind} {self.controller!r}>"

    async def run(self, starts: ProviderStarts) -> None:
        """Until cancelled."""
        try:
            await self._start(starts)
            log.info("instances.started", provider=self.provider.kind)
            async with Boundary() as tasks:
                self._tasks = tasks
                tasks.keep("instances/leader", self.leader.run)
                tasks.keep("instances/images", self._keep_images)
                try:
                    await self.controller.run()
                finally:
                    self._tasks = None  # what is begun once the others are cancelled would not be
        finally:
            await self.provider.close()

    @property
    def reconcilers(self) -> tuple[Reconciler, ...]:
        return (self.controller.reconciler, self.leader.reconciler)

    async def _keep_images(self) -> None:
        """Files may name images too, of instances that were made long ago."""
        while True:
            await self._images.refresh(self._guarded, self._groups.required())
            await self._clock.sleep(IMAGES_SECONDS)

    async def _start(self, starts: ProviderStarts) -> None:
        while True:
            try:
                await self.provider.start()
            except Exception as error:  # a plug-in: whatever it raises, the rest of the server goes on
                await starts.failed(error)
            else:
                starts.succeeded()
                return

    def suspect(self, instance: Instance) -> None:
        """The instance's agent went away; find out whether the instance did too."""
        if self._tasks is None or instance.name in self._rechecks or len(self._rechecks) >= RECHECKS_LIMIT:
            return
        self._rechecks.add(instance.name)
        task = self._tasks.once(
            "instances/recheck", partial(self.controller.recheck, instance), about=instance.name
        )
        task.add_done_callback(lambda _task: self._rechecks.discard(instance.name))
