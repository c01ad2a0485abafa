"""What every domain declares, and what it offers to the composition root once it is built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client.registry import Collector

from fleetplane.fleet.explain import ExplainedKind, Readers
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.people.door import Authenticators
from fleetplane.fleet.releases.agents_service import ReleaseAudience
from fleetplane.fleet.resources.declaration import AnyPublicResource
from fleetplane.fleet.rollouts.records import VersionedSubject
from fleetplane.kernel.access import Grant, Role
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.bindings import Bindings
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.revocation_lists import RevocationLists
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.stalls import StallDetector
from fleetplane.kernel.store import Store
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.rpc import Authentication, Authenticator, CallStatistics, MethodRow
from fleetplane.sections.base import ListenerSettings
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
    """Revoking a principal here ends its calls and streams on every listener."""
    operators: Operators
    """Who holds a token with which to act on this server."""
    revocation_lists: RevocationLists | None = None
    """Signed revocation lists for agents that accept callers; a domain makes its own where there is none."""
    telemetry: Telemetry | None = None
    """There if a domain's blueprint asks for it."""
    attention: StallDetector = field(default_factory=lambda: StallDetector(SystemClock()))
    """Gaps of this process; consulted before an agent is declared silent."""
    door: Authenticators = field(init=False)
    """Tells who shows a credential, for every surface."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "door", Authenticators(self.operators, self.revocations, Bindings(self.store))
        )


L = TypeVar("L", bound=ListenerSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """What a domain may know of the server that it is built in, beside its own settings."""

    version: str
    state_directory: Path
    """The data directory, wherever the process may go."""
    environment: Mapping[str, str]
    """For programs that the domain starts: none of our own settings."""
    own_names: frozenset[str]
    """Names under which this server is known, whichever domain they are for."""
    listeners: Mapping[str, ListenerSettings]

    def listener(self, name: str, kind: type[L]) -> L:
        """The settings of a listener that the domain declared."""
        found = self.listeners[name]
        assert isinstance(found, kind)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One gRPC service on one listener."""

    listener: str
    descriptor: ServiceDescriptor
    servicer: object
    raw_requests: Collection[str] = ()
    """Methods that take their requests as bytes."""
    rows: Sequence[MethodRow] = ()
    """Its rows of the method table, where no blueprint has them: a service on another domain's listener."""


class RunsInTwoParts(Protocol):
    """Something with work for every server, and work for one of them."""

    async def run_here(self) -> None:
        """The controllers of those agents that are connected to this server, until cancelled."""

    async def run_active(self) -> None:
        """What one server does for all: controllers, sweeps and deadlines, until cancelled."""


class TwoParts(RunsInTwoParts, Protocol):
    """Something that every server runs, and of which one of them, the active one, does more.

    The parts are begun in this order: `prepare_here`, `take_over`, `run_here` and `run_active`. On a server
    that stands by, `run_here` runs for as long as that takes, and goes on when `take_over` is called: agents
    may be connected to this server by then, and are to others all the time.
    """

    async def prepare_here(self) -> None:
        """Load what serving needs. What other servers have of their agents is left as it is."""

    async def take_over(self) -> None:
        """Correct stored state that is untrue since the server is gone that was active before.

        What agents with a session have, on whichever server, is left as it is.
        """


async def prepare_both(one: TwoParts) -> None:
    """On a server that is active from the beginning."""
    await one.prepare_here()
    await one.take_over()


async def run_both(one: RunsInTwoParts) -> None:
    """There, until cancelled."""
    async with Boundary() as tasks:
        tasks.keep(f"{type(one).__name__}/here", one.run_here)
        tasks.keep(f"{type(one).__name__}/active", one.run_active)


class Domain(TwoParts, Protocol):
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
        """What the web listener should pass on to this domain; asked for after `prepare_here`."""
        ...

    @property
    def notices(self) -> Sequence[str]:
        """Lines for the person who started the server, such as a password that is shown once."""
        ...

    def opened(self, addresses: Mapping[str, Sequence[str]]) -> None:
        """Learn where the listeners are, by name, once they accept; again when more of them do."""

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
    explain: Mapping[str, ExplainedKind] = field(default_factory=dict)
    """By a word for the kind, such as `agent`: things about which `fleetplane explain` can be asked."""
    readers: Callable[[Any], Readers[Any]] | None = None
    """From the running domain to those who may ask at `/v1/fleet`; without it nobody may there."""
    freeze: Freezable | None = None
    """What a freeze stops; None for a domain that does nothing by itself."""
    resources: Sequence[AnyPublicResource] = ()
    """What of its kinds the resource API shows, and how."""
    rollouts: Callable[[Any], Sequence[VersionedSubject]] | None = None
    """From the running domain to what of it can be rolled out."""
    releases: ReleaseAudience | None = None
    """How its agents get releases of themselves; None for a domain without agents."""


Build = Callable[[Any, ServerContext, Kernel], Awaitable[Domain]]
"""Makes the running domain from its own settings, which are of the type that it declared."""
