"""The instances domain as the server runs it, with the provider its document names and without listeners."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.instances.instances_lab import CONFIG_PATH, TENANT

from fleetplane.domains.blueprint import Kernel, prepare_both, run_both
from fleetplane.domains.instances.kinds import INSTANCE, Instance
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.domains.instances.server import BLUEPRINT, InstanceDomain, InstanceOptions
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.rpc import CallStatistics


@dataclass(slots=True)
class PlainDomain:
    domain: InstanceDomain
    store: Store
    objects: LocalObjects

    def instances(self) -> list[Instance]:
        return list(self.store.list(INSTANCE, f"tenant/{TENANT}"))

    def kind(self) -> str:
        machinery = self.domain._machinery
        return "" if machinery is None else machinery.provider.kind

    def provider(self) -> MockProvider | None:
        machinery = self.domain._machinery
        provider = None if machinery is None else machinery.provider
        return provider if isinstance(provider, MockProvider) else None

    def explanations(self) -> tuple[str, ...]:
        return self.domain._explanations.controllers

    async def configure(self, wanted: dict[str, Any]) -> None:
        await self.objects.put(CONFIG_PATH, json.dumps(wanted).encode())
        await self.domain._groups.refresh()


@asynccontextmanager
async def plain_domain(folder: Path, wanted: dict[str, Any]) -> AsyncIterator[PlainDomain]:
    clock = SystemClock()
    objects = LocalObjects(folder / "objects")
    await objects.put(CONFIG_PATH, json.dumps(wanted).encode())
    async with AsyncExitStack() as stack:
        kinds = (*KERNEL_KINDS, *BLUEPRINT.kinds)
        settings = StoreSettings(path=folder / "state.db")
        store = await stack.enter_async_context(Store.open(settings, kinds=kinds, clock=clock))
        master = MasterKey.from_file(folder / "master.key", clock)
        kernel = Kernel(
            store=store,
            clock=clock,
            calls=CallStatistics(),
            master=master,
            authority=await Authority.load_or_create(store, master, clock),
            revocations=Revocations(store, clock),
            operators=await Operators.load(store, master, clock),
        )
        workloads = await Authority.load_or_create(store, master, clock, purpose=WORKLOAD)
        nonces = await SigningKeys.load_or_create(store, master, clock, purpose="nonce", algorithm="EdDSA")
        options = InstanceOptions(shard="local", state_directory=folder / "instances", environment={})
        domain = InstanceDomain(kernel, objects, nonces, workloads, options)
        await prepare_both(domain)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_both(domain))
            yield PlainDomain(domain=domain, store=store, objects=objects)
            domain.drain()
            running.cancel()
