"""What every domain declares, and what it offers to the composition root once it is built."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.registry import Collector

from fleetplane.kernel.access import Grant, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.rpc import Authentication, Authenticator, CallStatistics, MethodRow
from fleetplane.web.ops import Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """What every domain stands on, opened once by the composition root."""

    store: Store
    clock: Clock
    calls: CallStatistics
    master: MasterKey
    authority: Authority
    revocations: Revocations
    """Whoever is revoked here is cut off everywhere at once."""
    operators: Operators
    """Who holds a token with which to act on this server."""
    telemetry: Telemetry | None = None
    """There if a domain's blueprint asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One gRPC service on one listener."""

    listener: str
    descriptor: ServiceDescriptor
    servicer: object
    raw_requests: Collection[str] = ()
    """Methods that take their requests as bytes."""


class Domain(Protocol):
    """A running domain. Its kinds, methods and grants are known before the kernel opens."""

    @property
    def services(self) -> Sequence[Service]: ...

    @property
    def authenticators(self) -> Mapping[str, Mapping[Authentication, Authenticator]]:
        """By listener, where the domain has its own way to tell who is calling."""
        ...

    @property
    def server_names(self) -> Sequence[str]:
        """Names and addresses by which clients will look for this server, beside those it is bound to."""
        ...

    @property
    def collectors(self) -> Sequence[Collector]: ...

    @property
    def routes(self) -> Sequence[Mount]:
        """What the web listener should pass on to this domain; asked for after `prepare`."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """Lines for the person who started the server, such as a password that is shown once."""
        ...

    async def prepare(self) -> None:
        """Bring stored state to what can be believed, before anyone may ask for it."""

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Learn where the listeners are, by name, once they accept."""

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
    operator_roles: Collection[Role] = ()
    """Roles that a token of an operator may hold; where there are any, such tokens can be made."""
    keeps_telemetry: bool = False
    """Whether it keeps time series or log lines; without such a domain their file is not opened."""
