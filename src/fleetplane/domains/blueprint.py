"""What every domain declares, and what it offers to the composition root once it is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.registry import Collector

from fleetplane.kernel.access import Grant, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.rpc import CallStatistics, MethodRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What every domain stands on, opened once by the composition root."""

    store: Store
    clock: Clock
    calls: CallStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One gRPC service on one listener."""

    listener: str
    descriptor: ServiceDescriptor
    servicer: object


class Domain(Protocol):
    """A running domain. Its kinds, methods and grants are known before the kernel opens."""

    @property
    def services(self) -> Sequence[Service]: ...

    @property
    def collectors(self) -> Sequence[Collector]: ...

    async def prepare(self) -> None:
        """Bring stored state to what can be believed, before anyone may ask for it."""

    async def run(self) -> None:
        """The domain's controllers, until cancelled."""

    def drain(self) -> None:
        """End open streams in the way their protocol calls clean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """What a domain declares before it is built."""

    name: str
    kinds: Sequence[AnyKind]
    methods: Sequence[MethodRow]
    grants: Mapping[Role, Iterable[Grant]]
