"""Machines that exist only in this process, doing whatever a test or a rehearsal asks of them.

Nothing here is slow, lost or broken unless it is scripted: by `MockFault`s, given as options or at
run time, and by the methods below `MockProvider.script`. With a `state_file` the machines outlive
the process, as real ones would outlive a killed server. Load balancers, routes, addresses and images are
plain attributes, for tests to look at and to change.
"""

from __future__ import annotations

import inspect
import os
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from fleetplane.domains.instances.providers.contract import (
    BalancerTargetState,
    CapacityExhausted,
    Created,
    CreateRequest,
    Description,
    ImageQuery,
    InstanceGone,
    LeaderNetwork,
    LoadBalancer,
    NatRoute,
    ObservedMachine,
    ProviderCapability,
    ProviderContext,
    ProviderError,
    ProviderPage,
    ProviderRefused,
    ProviderStatus,
    QuotaExhausted,
    ids_after,
)
from fleetplane.domains.instances.providers.options import ProviderOptions, parse
from fleetplane.kernel.errors import FleetplaneError


class MockNetwork(ABC):
    def __init__(self) -> None:
        self.targets: dict[str, set[str]] = defaultdict(set)
        """Provider ids behind each load balancer, by its key."""
        self.ending: set[str] = set()
        """Provider ids whose connections have not ended yet: taken out, they are seen draining."""
        self.routes: dict[tuple[str, str], NatRoute] = {}
        """By subnet and destination."""
        self.leaders: dict[str, str] = {}
        """Who has which leader address: provider ids by address."""
        self.images: dict[str, str] = {}
        """Ids by name, oldest first."""

    @abstractmethod
    def _call(self, operation: str) -> AbstractAsyncContextManager[None]: ...

    def lose(self, provider_id: str) -> None:
        """A machine is gone, and with it its place behind every load balancer."""
        self.ending.discard(provider_id)
        for targets in self.targets.values():
            targets.discard(provider_id)

    async def register_with_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002  # here and below: the contract's names
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> None:
        async with self._call("register_with_lb"):
            self.targets[balancer.key].add(provider_id)

    async def deregister_from_lb(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> None:
        async with self._call("deregister_from_lb"):
            self.targets[balancer.key].discard(provider_id)

    async def get_lb_target_state(
        self,
        provider_id: str,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
        wake_proxy: bool = False,  # noqa: ARG002
    ) -> BalancerTargetState:
        async with self._call("get_lb_target_state"):
            if provider_id in self.targets[balancer.key]:
                return BalancerTargetState.HEALTHY
            return (
                BalancerTargetState.DRAINING
                if provider_id in self.ending
                else BalancerTargetState.DEREGISTERED
            )

    async def list_lb_instances(
        self,
        balancer: LoadBalancer,
        *,
        zone: str = "",  # noqa: ARG002
    ) -> tuple[str, ...]:
        async with self._call("list_lb_instances"):
            return tuple(sorted(self.targets[balancer.key]))

    async def assign_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        async with self._call("assign_leader_network"):
            self.leaders[network.ip] = provider_id

    async def release_leader_network(self, provider_id: str, network: LeaderNetwork) -> None:
        async with self._call("release_leader_network"):
            if self.leaders.get(network.ip) == provider_id:
                del self.leaders[network.ip]

    async def ensure_nat_route(self, route: NatRoute) -> None:
        async with self._call("ensure_nat_route"):
            there = self.routes.get((route.subnet, route.destination))
            known = ("", route.provider_id, route.previous_provider_id)
            if there is not None and there.provider_id not in known:
                raise ProviderRefused(f"mock: the route of {route.subnet} leads through {there.provider_id}")
            self.routes[route.subnet, route.destination] = route

    async def remove_nat_route(self, route: NatRoute) -> None:
        async with self._call("remove_nat_route"):
            there = self.routes.get((route.subnet, route.destination))
            if there is not None and there.provider_id == route.provider_id:
                del self.routes[route.subnet, route.destination]

    async def find_image(self, query: ImageQuery) -> str:
        async with self._call("find_image"):
            wanted = query.filters.get("name", ())
            found = [name for name in self.images if any(fnmatchcase(name, one) for one in wanted)]
            if query.sort == "name":
                found.sort()
            return self.images[found[-1 if query.newest_first else 0]] if found else ""

    def is_spot(self, args: Mapping[str, object]) -> bool:
        return bool(args.get("spot"))


VERSION = "1"
Owner = tuple[str, str]
OnCreate = Callable[[CreateRequest], Awaitable[None] | None]

ERRORS: Mapping[str, type[FleetplaneError]] = {
    "unavailable": ProviderError,
    "refused": ProviderRefused,
    "quota": QuotaExhausted,
    "capacity": CapacityExhausted,
    "gone": InstanceGone,
}


class MockFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What befalls the next calls of one operation."""

    operation: str
    """Such as `create_instance`."""
    count: int = 1
    """How many calls; 0: all that follow."""
    after: bool = False
    """The deed is done first: with an error, the answer is lost."""
    delay_seconds: float = 0.0
    error: Literal["", "unavailable", "refused", "quota", "capacity", "gone"] = "unavailable"
    """Empty: the call is only slow."""


class MockOptions(ProviderOptions, frozen=True):
    state_file: str = ""
    """Relative to the provider's state directory."""
    delay_seconds: float = 0.0
    max_instances: int = 0
    """0: no quota."""
    full_subnets: tuple[str, ...] = ()
    first_status: ProviderStatus = ProviderStatus.RUNNING
    faults: tuple[MockFault, ...] = ()
    images: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Ids by name, oldest first: what look-ups by the filter `name` find."""


class _StateLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the state file: an instance as it now is, or one that is no more."""

    put: ObservedMachine | None = None
    drop: str = ""


class MockProvider(MockNetwork):
    kind = "mock"

    def __init__(self, context: ProviderContext, *, on_create: OnCreate | None = None) -> None:
        super().__init__()
        self._context = context
        self._options = MockOptions()
        self._instances: dict[str, ObservedMachine] = {}
        self._ids: dict[Owner, list[str]] = defaultdict(list)
        self._faults: list[MockFault] = []
        self._full_subnets: set[str] = set()
        self._journal: int | None = None
        self.on_create = on_create
        """Called with the request of every machine that is made, once: where simulated agents begin."""
        self.calls: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<MockProvider instances={len(self._instances)} faults={len(self._faults)}>"

    def describe(self) -> Description:
        return Description(
            name=self.kind,
            version=VERSION,
            summary="machines that exist only in this process, for tests and rehearsals",
            options={
                "state_file": "keep the machines in this file, so that they outlive the process",
                "delay_seconds": "how long every call takes",
                "max_instances": "a quota; 0 means none",
                "full_subnets": "subnets without a free address",
                "first_status": "the status of a machine just made",
                "images": "image ids by name, oldest first",
                "faults": "what goes wrong: operation, count, after, delay_seconds, error",
            },
            capabilities=frozenset(ProviderCapability),
            durable=bool(self._options.state_file),
            prompt=True,
        )

    def configure(self, options: Mapping[str, object]) -> None:
        self._options = parse(self.kind, options, MockOptions)
        self._faults = list(self._options.faults)
        self._full_subnets = set(self._options.full_subnets)
        self.images = dict(self._options.images)

    def validate(self) -> list[str]:
        return [
            f"faults: there is no operation {fault.operation!r}"
            for fault in self._options.faults
            if not inspect.iscoroutinefunction(getattr(self, fault.operation, None))
        ]

    async def start(self) -> None:
        if not self._options.state_file or self._journal is not None:
            return
        path = self._context.state_directory / self._options.state_file
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for instance in read_state(path).values():
            self._remember(instance)
        # Compacted by replacing it, so that a crash here leaves the old file or the new one.
        fresh = path.with_suffix(".new")
        fresh.write_bytes(b"".join(_line(_StateLine(put=instance)) for instance in self._instances.values()))
        fresh.replace(path)
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND)

    async def close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    # What a test says to it.

    def script(self, fault: MockFault) -> None:
        """Let `fault` befall the next calls; faults of one operation are used up in order."""
        self._faults.append(fault)

    def heal(self) -> None:
        """Forget every fault and free every subnet."""
        self._faults.clear()
        self._full_subnets.clear()

    def set_status(self, instance_id: str, status: ProviderStatus) -> None:
        self._put(msgspec.structs.replace(self._instances[instance_id], status=status))

    def vanish(self, instance_id: str) -> None:
        """Remove a machine without any notification."""
        self._drop(instance_id)

    def fill_subnet(self, subnet: str) -> None:
        self._full_subnets.add(subnet)

    @property
    def instances(self) -> Mapping[str, ObservedMachine]:
        """What exists, by instance id."""
        return self._instances

    # What the server asks of it.

    async def create_instance(self, request: CreateRequest) -> Created:
        async with self._call("create_instance"):
            instance = self._instances.get(request.instance_id)
            if instance is None:
                instance = self._make(request)
                self._put(instance)
                # Before the answer, which may be lost: the machine boots regardless.
                if self.on_create is not None and (pending := self.on_create(request)) is not None:
                    await pending
            return instance.as_created()

    async def delete_instance(self, instance_id: str, provider_id: str) -> None:
        async with self._call("delete_instance"):
            self._find(instance_id, provider_id)
            self._drop(instance_id)

    async def get_instance_status(self, instance_id: str, provider_id: str) -> ObservedMachine:
        async with self._call("get_instance_status"):
            return self._find(instance_id, provider_id)

    async def list_instances(
        self, cluster: str, shard: str, *, limit: int, next_token: str = ""
    ) -> ProviderPage:
        async with self._call("list_instances"):
            ids, token = ids_after(self._ids.get((cluster, shard), ()), next_token, limit)
            return ProviderPage(items=tuple(self._instances[each] for each in ids), next_token=token)

    async def check_subnet_capacity(self, subnet: str) -> bool:
        async with self._call("check_subnet_capacity"):
            return subnet not in self._full_subnets

    # How it keeps track.

    @asynccontextmanager
    async def _call(self, operation: str) -> AsyncIterator[None]:
        """Count the call and let it suffer the next fault of its operation, before or after the deed."""
        self.calls[operation] += 1
        if self._options.delay_seconds:
            await self._context.clock.sleep(self._options.delay_seconds)
        fault = self._next_fault(operation)
        if fault is not None and not fault.after:
            await self._suffer(fault)
        yield
        if fault is not None and fault.after:
            await self._suffer(fault)

    def _next_fault(self, operation: str) -> MockFault | None:
        for index, fault in enumerate(self._faults):
            if fault.operation == operation:
                if fault.count == 1:
                    del self._faults[index]
                elif fault.count > 1:
                    self._faults[index] = msgspec.structs.replace(fault, count=fault.count - 1)
                return fault
        return None

    async def _suffer(self, fault: MockFault) -> None:
        if fault.delay_seconds:
            await self._context.clock.sleep(fault.delay_seconds)
        if fault.error:
            what = "the answer was lost" if fault.after else "as scripted"
            raise ERRORS[fault.error](f"mock: {fault.operation} failed, {what}")

    def _make(self, request: CreateRequest) -> ObservedMachine:
        if request.subnet in self._full_subnets:
            raise CapacityExhausted(f"mock: subnet {request.subnet!r} has no free address")
        if self._options.max_instances and len(self._instances) >= self._options.max_instances:
            raise QuotaExhausted(f"mock: {self._options.max_instances} instances are all there may be")
        return ObservedMachine(
            instance_id=request.instance_id,
            provider_id=f"mock-{request.instance_id}",
            status=self._options.first_status,
            private_ipv4="127.0.0.1",
            hostname=request.instance_id,
            launched_at_ns=self._context.clock.now_ns(),
            instance_type=request.instance_type,
            region=self._context.region,
            zone=self._context.zone,
            cluster=request.cluster,
            shard=request.shard,
            tags=request.all_tags(),
        )

    def _find(self, instance_id: str, provider_id: str) -> ObservedMachine:
        instance = self._instances.get(instance_id)
        if instance is None or (provider_id and provider_id != instance.provider_id):
            raise InstanceGone(f"mock has no instance {instance_id!r}")
        return instance

    def _put(self, instance: ObservedMachine) -> None:
        self._remember(instance)
        self._note(_StateLine(put=instance))

    def _remember(self, instance: ObservedMachine) -> None:
        if instance.instance_id not in self._instances:
            insort(self._ids[instance.cluster, instance.shard], instance.instance_id)
        self._instances[instance.instance_id] = instance

    def _drop(self, instance_id: str) -> None:
        instance = self._instances.pop(instance_id)
        siblings = self._ids[instance.cluster, instance.shard]
        del siblings[bisect_left(siblings, instance_id)]
        self.lose(instance.provider_id)
        self._note(_StateLine(drop=instance_id))

    def _note(self, entry: _StateLine) -> None:
        # Unsynced: it must survive the death of this process, not of the machine.
        if self._journal is not None:
            os.write(self._journal, _line(entry))


def read_state(path: Path) -> dict[str, ObservedMachine]:
    """The instances in a state file, also while a provider writes it. A torn last line is ignored."""
    instances: dict[str, ObservedMachine] = {}
    if not path.exists():
        return instances
    decoder = msgspec.json.Decoder(_StateLine)
    whole = path.read_bytes().rpartition(b"\n")[0]
    for line in whole.splitlines():
        entry = decoder.decode(line)
        if entry.put is not None:
            instances[entry.put.instance_id] = entry.put
        else:
            instances.pop(entry.drop, None)
    return instances


def _line(entry: _StateLine) -> bytes:
    return msgspec.json.encode(entry) + b"\n"
