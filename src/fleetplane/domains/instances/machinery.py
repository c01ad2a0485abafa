"""Provider and controller: the part that can only run once a configuration is in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from fleetplane.domains.instances.balancers import Balancers
from fleetplane.domains.instances.controller import GroupController
from fleetplane.domains.instances.files import Addresses, FileMaker
from fleetplane.domains.instances.groups import Groups
from fleetplane.domains.instances.guarded import GuardedProvider
from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.launcher import Launcher
from fleetplane.domains.instances.observations import Observations
from fleetplane.domains.instances.providers import registry as providers
from fleetplane.domains.instances.providers.contract import Provider, ProviderContext
from fleetplane.domains.instances.registry import Instances
from fleetplane.domains.instances.reports import Reports
from fleetplane.domains.instances.work import ErrorSink, Parts
from fleetplane.kernel.backoff import Backoff
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.identity import Authority
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.store import Store

log = structlog.get_logger(__name__)

START_RETRY = Backoff(first_seconds=1.0, ceiling_seconds=60.0)
"""Between tries at a provider that cannot be had or does not start."""
RECHECKS_LIMIT = 1024
"""Instances asked about at a time because their agents went away; the regular look finds the rest."""


class Machinery:
    def __init__(
        self,
        *,
        store: Store,
        instances: Instances,
        groups: Groups,
        reports: Reports,
        files: FileMaker,
        provider: Provider,
        nonces: SigningKeys,
        authority: Authority,
        addresses: Callable[[], Addresses],
        clock: Clock,
        complain: ErrorSink,
        gone: Callable[[Instance], None],
    ) -> None:
        self.provider = provider
        guarded = GuardedProvider(provider)
        self.observations = Observations(guarded, clock)
        self.launcher = Launcher(
            instances=instances,
            groups=groups,
            provider=guarded,
            nonces=nonces,
            authority=authority,
            files=files,
            addresses=addresses,
            clock=clock,
        )
        self.controller = GroupController(
            Parts(
                store=store,
                instances=instances,
                groups=groups,
                reports=reports,
                provider=guarded,
                observations=self.observations,
                launcher=self.launcher,
                balancers=Balancers(guarded, instances, groups, clock),
                clock=clock,
                complain=complain,
                gone=gone,
            )
        )
        self._clock = clock
        self._rechecks: set[str] = set()
        self._tasks: asyncio.TaskGroup | None = None

    def __repr__(self) -> str:
        return f"<Machinery {self.provider.kind} {self.controller!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        await self._start()
        log.info("instances.started", provider=self.provider.kind)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self.controller.run())
        finally:
            self._tasks = None
            await self.provider.close()

    async def _start(self) -> None:
        attempt = 0
        while True:
            try:
                await self.provider.start()
            except Exception as error:  # a plug-in: whatever it raises, the rest of the server goes on
                await _pause(self._clock, attempt, error)
                attempt += 1
            else:
                return

    def suspect(self, instance: Instance) -> None:
        """The instance's agent went away; find out whether the instance did too."""
        if self._tasks is None or instance.name in self._rechecks or len(self._rechecks) >= RECHECKS_LIMIT:
            return
        self._rechecks.add(instance.name)
        task = self._tasks.create_task(self.controller.recheck(instance))
        task.add_done_callback(lambda _task: self._rechecks.discard(instance.name))


async def usable_provider(
    groups: Groups, kind: str, *, state_directory: Path, environment: Mapping[str, str], clock: Clock
) -> Provider:
    """As `load_provider`, but a document that names a wrong one is waited out until it is put right."""
    attempt = 0
    while True:
        try:
            return load_provider(
                groups, kind, state_directory=state_directory, environment=environment, clock=clock
            )
        except FleetplaneError as error:
            await _pause(clock, attempt, error)
            attempt += 1


async def _pause(clock: Clock, attempt: int, error: Exception) -> None:
    wait = START_RETRY.delay_seconds(attempt, jitter=clock.random())
    text = error.message if isinstance(error, FleetplaneError) else f"{type(error).__name__}: {error}"
    log.error("instances.provider_unusable", error=text, retry_seconds=round(wait, 1))
    await clock.sleep(wait)


def load_provider(
    groups: Groups, kind: str, *, state_directory: Path, environment: Mapping[str, str], clock: Clock
) -> Provider:
    """The provider that the configuration names, or the one that the server was told to use."""
    infra = groups.required().shard.infra
    context = ProviderContext(
        clock=clock,
        state_directory=state_directory,
        environment=environment,
        region=infra.region,
        zone=infra.zone,
    )
    return providers.load(kind or infra.provider, infra.options, context=context)
