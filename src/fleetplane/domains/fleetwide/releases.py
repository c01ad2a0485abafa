"""Agents' own upgrades, put together for every domain of a server that has agents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.registry import Collector

from fleetplane.domains.blueprint import Blueprint, Domain, Kernel, Service
from fleetplane.fleet.freeze import Freezable
from fleetplane.fleet.releases import agents_service
from fleetplane.fleet.releases.agents_service import DomainReleases, ReleaseService
from fleetplane.fleet.releases.check_in import CheckInPolicy, CheckIns
from fleetplane.fleet.releases.records import ReleaseKey
from fleetplane.fleet.releases.releases import Releases
from fleetplane.fleet.releases.resource import ReleaseCollector
from fleetplane.fleet.releases.shelf import Shelf
from fleetplane.fleet.releases.subject import AgentVersions
from fleetplane.gen.fleetplane.fleet.v1 import releases_pb2
from fleetplane.kernel.access import Permission
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.objects import Objects
from fleetplane.rpc import Authentication, service_rows

SWEEP_SECONDS = 3600.0
DIRECTORY = "releases"
"""In the data directory."""
FREEZABLE = Freezable(stops="upgrading agents", scopes=("agents/{domain}",))
_ADMIN = releases_pb2.DESCRIPTOR.services_by_name["ReleaseAdmin"]
_READS = ("ListReleases", "GetRelease")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOptions:
    """Where files of releases lie, how agents ask, and what vouches for it all."""

    directory: Path
    key: ReleaseKey
    policy: CheckInPolicy
    shared: Objects | None = None
    """Where other servers find the files, too."""


class ReleaseSide:
    def __init__(
        self,
        kernel: Kernel,
        running: Iterable[tuple[Blueprint, Domain]],
        options: ReleaseOptions,
        *,
        listener: str,
        manage: Permission,
    ) -> None:
        """`listener` is the owner's, with the permission that its callers have."""
        self._clock: Clock = kernel.clock
        audiences = [(one.name, one.releases, domain) for one, domain in running if one.releases is not None]
        registers = {name: audience.register(domain, kernel.store) for name, audience, domain in audiences}
        self.releases = Releases(
            kernel.store, kernel.clock, Shelf(options.directory, options.shared), options.key
        )
        self.check_ins = CheckIns(kernel.store, kernel.clock, self.releases, registers, options.policy)
        self.subject = AgentVersions(kernel.store, self.check_ins)
        rows = service_rows(
            _ADMIN, manage, listener=listener, authentication=Authentication.LOCAL, reads=_READS
        )
        self.services: Sequence[Service] = (
            Service(
                listener=listener,
                descriptor=_ADMIN,
                servicer=ReleaseService(self.releases),
                rows=tuple(rows),
            ),
            *(
                Service(
                    listener=audience.listener,
                    descriptor=agents_service.SERVICE,
                    servicer=DomainReleases(self.check_ins, name, registers[name]),
                    rows=tuple(audience.rows()),
                )
                for name, audience, _ in audiences
            ),
        )
        self.collectors: Sequence[Collector] = (ReleaseCollector(kernel.store, self.check_ins),)

    def __repr__(self) -> str:
        return f"<ReleaseSide {self.releases!r}>"

    async def run_here(self) -> None:
        """Note whom this server hears, until cancelled."""
        await self.check_ins.run_here()

    async def run_active(self) -> None:
        """Forget agents that are gone, now and then."""
        while True:
            await self._clock.sleep(SWEEP_SECONDS)
            await self.check_ins.sweep()


async def release_options(
    kernel: Kernel,
    state_directory: Path,
    *,
    shared: Objects | None,
    check_in_seconds: float,
    hello_seconds: float,
) -> ReleaseOptions:
    """The options of a server with these settings."""
    key = await ReleaseKey.load_or_create(kernel.store, kernel.master)
    policy = CheckInPolicy(every_seconds=check_in_seconds, hello_seconds=hello_seconds)
    return ReleaseOptions(directory=state_directory / DIRECTORY, key=key, policy=policy, shared=shared)
