"""The controller of groups with everything it needs and nothing else, under virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from support.instances.instances_lab import CONFIG_PATH, TENANT, document

from fleetplane.domains.instances.content.downloads import Downloads
from fleetplane.domains.instances.content.files import FileMaker, InstanceSecrets, ServerAddresses
from fleetplane.domains.instances.content.images import Images
from fleetplane.domains.instances.controllers.assembly import Machinery, ProviderStarts
from fleetplane.domains.instances.kinds import HealthReport, Instance, InstanceStatus
from fleetplane.domains.instances.providers.contract import ProviderContext
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.domains.instances.records.groups import Groups, GroupView, SilencePolicy
from fleetplane.domains.instances.records.instances import Instances
from fleetplane.domains.instances.records.reports import InstanceReports
from fleetplane.domains.instances.rules import decide as rules
from fleetplane.domains.instances.server import BLUEPRINT
from fleetplane.kernel.freeze import freeze
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sim.clock import VirtualClock

GROUP = "workers"
KEY = f"{TENANT}/{GROUP}"
STEP_SECONDS = 0.5
IDLE_SECONDS = 60.0
TURNS = 10
"""Of the event loop, in which those who follow the store hear of a write."""


COLLECTION = {"interval": "1s", "registration_timeout": "60s", "deleted_record_retention": "1h"}


def wanted(size: int = 1, **shard: Any) -> dict[str, Any]:
    """One group; reports are due every ten seconds, drains take twenty."""
    defaults = {"health_check_interval": "10s", "default_drain_timeout": "20s"}
    return document(size, shard={**defaults, "garbage_collection": COLLECTION, **shard})


@dataclass(slots=True)
class Rig:
    clock: VirtualClock
    store: Store
    objects: LocalObjects
    instances: Instances
    groups: Groups
    reports: InstanceReports
    provider: MockProvider
    machinery: Machinery
    errors: list[tuple[str, str, str, str]]
    gone: list[str]
    attention: StallDetector
    """Does not beat unless a test has it run."""
    writing: list[object] = field(default_factory=list)
    """Transactions that are under way: the disk takes its time by another clock."""
    silent: set[str] = field(default_factory=set)
    """Registered instances that do not report; all others do, at every step."""

    # Time.

    async def advance(self, seconds: float = STEP_SECONDS) -> None:
        """Let time pass in small steps, after each of which everything that is due is done."""
        await self.idle()
        while seconds > 0:
            self._beat()
            await self.clock.advance(min(STEP_SECONDS, seconds))
            seconds -= STEP_SECONDS
            await self.idle()

    async def idle(self) -> None:
        queue = self.machinery.controller.reconciler._queue
        async with asyncio.timeout(IDLE_SECONDS):
            while True:
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                due = queue.next_due() <= self.clock.monotonic()
                if not (queue.running or due or self.writing):
                    return
                await asyncio.sleep(0.001)

    def _beat(self) -> None:
        for instance in self.live():
            if instance.name not in self.silent and rules._registered(instance):
                self.reports.take(HealthReport(instance=instance.name, version="test"))

    # What there is.

    def all(self) -> list[Instance]:
        """Oldest first."""
        found = self.instances.all(TENANT)
        return sorted(found, key=lambda one: (one.created_at_ns, one.name))

    def live(self) -> list[Instance]:
        return [one for one in self.all() if rules.state(one) is not rules.State.DELETED]

    def names(self, *states: rules.State) -> list[str]:
        return [one.name for one in self.all() if not states or rules.state(one) in states]

    def cause(self, name: str) -> str:
        status = self.instances.get(TENANT, name).status
        return status.drain.reason if status is not None and status.drain is not None else ""

    def machines(self) -> set[str]:
        return set(self.provider.instances)

    def explained(self) -> dict[str, str]:
        """What the last pass said, by code."""
        found = self.machinery.controller.reconciler.explain(KEY)
        return {} if found is None else {reason.code: reason.message for reason in found.reasons}

    def view(self) -> GroupView:
        found = self.groups.view(TENANT, GROUP)
        assert found is not None
        return found

    # What happens to it.

    async def freeze(self, reason: str) -> None:
        await freeze(self.store, reason=reason, actor="ada")

    async def configure(self, wanted: dict[str, Any]) -> None:
        await self.objects.put(CONFIG_PATH, json.dumps(wanted).encode())
        await self.groups.refresh()

    async def register(self, *names: str) -> None:
        """Their agents come; all that are there if none is named."""

        def registered(status: InstanceStatus, now_ns: int) -> InstanceStatus:
            return msgspec.structs.replace(status, registered_at_ns=now_ns)

        for name in names or self.names(rules.State.PROVISIONED):
            await self.instances.step(TENANT, name, registered, action="register")

    async def grown(self, size: int) -> list[str]:
        """So many instances, all registered, each a second older than the next."""
        for _ in range(4 * size):
            if len(self.names(rules.State.PROVISIONED, rules.State.REGISTERED)) >= size:
                break
            await self.advance()
        await self.register()
        await self.advance()
        names = self.names(rules.State.REGISTERED)
        assert len(names) == size
        return names


@asynccontextmanager
async def rig(
    folder: Path,
    wanted: dict[str, Any],
    *,
    clock: VirtualClock | None = None,
    provider: MockProvider | None = None,
    downloads: Downloads | None = None,
    machine: str = "",
    **policy: float,
) -> AsyncIterator[Rig]:
    """`policy`: what the server's settings say about silence."""
    clock = clock or VirtualClock()
    async with AsyncExitStack() as stack:
        kinds = (*KERNEL_KINDS, *BLUEPRINT.kinds)
        settings = StoreSettings(path=folder / "state.db")
        store = await stack.enter_async_context(Store.open(settings, kinds=kinds, clock=clock))
        writing: list[object] = []
        _count_writes(store, writing)
        master = MasterKey.from_file(folder / "master.key", clock)
        authority = await Authority.load_or_create(store, master, clock)
        workloads = await Authority.load_or_create(store, master, clock, purpose=WORKLOAD)
        nonces = await SigningKeys.load_or_create(store, master, clock, purpose="nonce", algorithm="EdDSA")
        objects = LocalObjects(folder / "objects")
        await objects.put(CONFIG_PATH, json.dumps(wanted).encode())
        instances = Instances(store)
        attention = StallDetector(clock)
        groups = Groups(
            store,
            instances,
            objects,
            shard="local",
            drain_on_scale_down=True,
            silence=SilencePolicy(**policy),
            attention=attention,
        )
        await groups.refresh()
        reports = InstanceReports(clock)
        mock = provider or MockProvider(ProviderContext(clock=clock, state_directory=folder / "mock"))
        errors: list[tuple[str, str, str, str]] = []
        gone: list[str] = []
        images = Images(clock)
        files = FileMaker(
            objects=objects,
            secrets=InstanceSecrets(objects, master),
            authority=authority,
            workloads=workloads,
            addresses=ServerAddresses,
            now_ns=clock.now_ns,
            images=images.ids,
        )
        machinery = Machinery(
            store=store,
            instances=instances,
            groups=groups,
            reports=reports,
            files=files,
            provider=mock,
            nonces=nonces,
            authority=authority,
            addresses=ServerAddresses,
            clock=clock,
            images=images,
            downloads=downloads or Downloads(objects, clock),
            machine=machine,
            complain=lambda *told: errors.append(told),
            gone=lambda one: gone.append(one.name),
        )
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(machinery.run(ProviderStarts(clock)))
            made = Rig(
                clock=clock,
                store=store,
                objects=objects,
                instances=instances,
                groups=groups,
                reports=reports,
                provider=mock,
                machinery=machinery,
                errors=errors,
                gone=gone,
                attention=attention,
                writing=writing,
            )
            await made.advance()
            yield made
            running.cancel()


def _count_writes(store: Store, writing: list[object]) -> None:
    transact = store.transact

    async def counted(*args: Any, **options: Any) -> Any:
        writing.append(mark := object())
        try:
            return await transact(*args, **options)
        finally:
            writing.remove(mark)

    store.transact = counted  # type: ignore[method-assign]
