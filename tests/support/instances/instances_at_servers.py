"""The instances domain at three servers on one database in memory, in virtual time; the first is active."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf.empty_pb2 import Empty
from support.instances.operator_rig import CONFIG_PATH, TENANT, document
from support.shared.three_stores import three_stores
from support.shared.virtual_loop import run

from fleetplane.domains.blueprint import Kernel, prepare_both, run_both
from fleetplane.domains.instances.kinds import Instance
from fleetplane.domains.instances.providers.contract import ProviderContext
from fleetplane.domains.instances.providers.mock.provider import MockProvider
from fleetplane.domains.instances.server import BLUEPRINT, InstanceDomain, InstanceOptions
from fleetplane.gen.nstance.v1 import operator_pb2
from fleetplane.kernel.access import Principal, Role
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.authority import WORKLOAD
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import SigningKeys
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.rpc import CallStatistics

SECONDS = 600.0
"""Of virtual time."""


@dataclass(slots=True, kw_only=True)
class Here:
    """One server, and how an operator calls it."""

    store: Store
    domain: InstanceDomain

    async def call(self, method: str, request: Any = None, *, tenant: str = TENANT) -> Any:
        """A method of operators, past the gate as calls come."""
        return await self._called(self.domain._operators, method, request or Empty(), _operator(tenant))

    async def admin(self, method: str, request: Any) -> Any:
        servicer = next(one.servicer for one in self.domain.services if hasattr(one.servicer, method))
        return await self._called(servicer, method, request, Principal(name="owner", roles=frozenset()))

    async def _called(self, servicer: Any, method: str, request: Any, caller: Principal) -> Any:
        await self.store.confirmed()
        await self.store.refreshed()
        with self.store.writing_here():
            return await getattr(servicer, method)(request, SimpleNamespace(principal=caller))

    def watch(self, method: str, *, tenant: str = TENANT) -> AsyncIterator[Any]:
        async def nothing(_metadata: object) -> None: ...

        context = SimpleNamespace(principal=_operator(tenant), send_initial_metadata=nothing)
        stream: AsyncIterator[Any] = getattr(self.domain._operators, method)(Empty(), context)
        return stream

    async def upsert(self, key: str, **config: Any) -> Any:
        request = operator_pb2.UpsertGroupRequest(key=key, config=operator_pb2.GroupConfig(**config))
        return await self.call("UpsertGroup", request)

    async def create(self, instance_id: str = "", *, tenant: str = TENANT, **config: Any) -> Any:
        request = operator_pb2.CreateInstanceRequest(
            instance_id=instance_id, config=operator_pb2.InstanceConfig(**config)
        )
        return await self.call("CreateInstance", request, tenant=tenant)

    def instances(self, tenant: str = TENANT) -> Sequence[Instance]:
        return self.domain._instances.all(tenant)


def _operator(tenant: str) -> Principal:
    return Principal(name=f"operator/{tenant}/lab", roles=frozenset({Role("operator")}))


@dataclass(slots=True, kw_only=True)
class Servers:
    active: Here
    two: Here
    three: Here
    provider: MockProvider
    objects: LocalObjects

    @property
    def all(self) -> tuple[Here, Here, Here]:
        return self.active, self.two, self.three

    async def configure(self, wanted: Mapping[str, Any]) -> None:
        """Put another document into the storage; it is not in force by that."""
        await self.objects.put(CONFIG_PATH, json.dumps(wanted).encode())


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.01)


def quiet_document(**changes: Any) -> dict[str, Any]:
    """Without groups that make instances by themselves, and without NAT."""
    found = document(nat={})
    found["groups"] = {
        TENANT: {"web": {"template": "worker", "size": 0}, "api": {"template": "worker", "size": 0}},
        "umbrella": {"secret": {"template": "worker", "size": 0}},
    }
    return {**found, **changes}


@asynccontextmanager
async def servers(folder: Path, wanted: Mapping[str, Any] | None = None) -> AsyncIterator[Servers]:
    objects = LocalObjects(folder / "objects")
    await objects.put(CONFIG_PATH, json.dumps(wanted or quiet_document()).encode())
    async with AsyncExitStack() as stack:
        stores = await stack.enter_async_context(three_stores((*KERNEL_KINDS, *BLUEPRINT.kinds)))
        provider = MockProvider(ProviderContext(clock=stores[0].clock, state_directory=folder / "mock"))
        made = []
        for store in stores:
            domain = await domain_at(folder, store, objects, provider if store is stores[0] else None)
            made.append(Here(store=store, domain=domain))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        await prepare_both(made[0].domain)
        running = [tasks.create_task(run_both(made[0].domain))]
        for one in made[1:]:
            with one.store.writing_here():
                await one.domain.prepare_here()
                running.append(tasks.create_task(one.domain.run_here()))
        await until(lambda: made[0].domain._machinery is not None)
        yield Servers(active=made[0], two=made[1], three=made[2], provider=provider, objects=objects)
        for one in made:
            one.domain.drain()
        for task in running:
            task.cancel()


async def domain_at(
    folder: Path, store: Store, objects: LocalObjects, provider: MockProvider | None
) -> InstanceDomain:
    """As a server builds it; `provider` is for the one that is active."""
    clock, master = store.clock, MasterKey(b"k" * 32, store.clock)
    kernel = Kernel(
        store=store,
        clock=clock,
        calls=CallStatistics(),
        master=master,
        authority=await Authority.load_or_create(store, master, clock),
        revocations=Revocations(store, clock),
        operators=await Operators.load(store, master, clock),
        attention=StallDetector(clock),
    )
    workloads = await Authority.load_or_create(store, master, clock, purpose=WORKLOAD)
    nonces = await SigningKeys.load_or_create(store, master, clock, purpose="nonce", algorithm="EdDSA")
    options = InstanceOptions(
        shard="local", state_directory=folder / "instances", environment={}, tenant_instances=4
    )
    return InstanceDomain(kernel, objects, nonces, workloads, options, provider=provider)


def with_servers(
    folder: Path, work: Callable[[Servers], Awaitable[None]], wanted: Mapping[str, Any] | None = None
) -> None:
    async def all_of_it() -> None:
        async with servers(folder, wanted) as found:
            await work(found)

    run(all_of_it())
