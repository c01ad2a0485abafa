"""Which providers are alive, and what follows when one falls silent.

A provider holds a lease from its first heartbeat on; every later call that names it renews
the lease. Providers that never send a heartbeat hold none and are never declared silent.
Heartbeats stay in memory; only the change they cause is written.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy, HeldLease
from fleetplane.fleet.streams.silence import SilenceWatch
from fleetplane.kernel.boundary import Boundary
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, Unimplemented
from fleetplane.kernel.liveness import Liveness, LivenessChanged, LivenessPolicy
from fleetplane.kernel.stalls import StallDetector

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""Seconds between attempts to write `ProviderSilent`."""


@dataclass(slots=True)
class ProviderLease:
    """What is remembered of one provider while it holds a lease."""

    provider: str
    gpus_named: int = 0
    """In its last heartbeat. The names themselves would be megabytes, if someone wanted them to."""
    heard_at_ns: int = 0
    heartbeats: int = 0
    is_partial: bool = False
    """Other servers count heartbeats of it, too."""
    expiries: int = 0


class ProviderLeases(Protocol):
    """Who holds a lease: in memory (`Providers`), or among all servers of a database (`SharedProviders`)."""

    def leases(self) -> Iterator[tuple[ProviderLease, bool]]:
        """Every lease, and whether its holder is alive."""
        ...

    def heard(self, provider: str) -> None:
        """Renew the lease of a provider that made any other call."""
        ...

    async def heartbeat(self, provider: str, gpu_names: frozenset[str], *, actor: str) -> None:
        """Grant or renew its lease, and let what it had said be read again."""
        ...


def check_leases_are_on(policy: GpuPolicy) -> None:
    if policy.lease_seconds == 0:
        raise Unimplemented("heartbeat is turned off on this server", hint="set gpus.lease_seconds above 0")


class Providers:
    def __init__(self, gpus: Gpus, policy: GpuPolicy, clock: Clock, attention: StallDetector) -> None:
        self._gpus = gpus
        self._policy = policy
        self._clock = clock
        self._leases: dict[str, ProviderLease] = {}
        # A lease has no second stage: silent is silent, so nobody is ever declared dead.
        lasting = LivenessPolicy(
            stale_after_seconds=policy.lease_seconds or math.inf, dead_after_seconds=math.inf
        )
        self._watch = SilenceWatch(clock, lasting, attention)
        self._unwritten: set[str] = set()
        """Silent providers for which `ProviderSilent` is not written yet."""
        self._silence = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Providers leases={len(self._leases)} {self._watch!r}>"

    def leases(self) -> Iterator[tuple[ProviderLease, bool]]:
        """Every lease, and whether its holder is alive."""
        for lease in self._leases.values():
            yield lease, self._is_alive(lease)

    def heard(self, provider: str) -> None:
        """Renew the lease of a provider that made any other call."""
        if (lease := self._leases.get(provider)) is not None:
            self._renew(lease)

    async def heartbeat(self, provider: str, gpu_names: frozenset[str], *, actor: str) -> None:
        check_leases_are_on(self._policy)
        lease = self._leases.get(provider)
        if lease is None:
            lease = self._grant(provider)
        lease.gpus_named = len(gpu_names)
        lease.heartbeats += 1
        self._renew(lease)
        await self._gpus.provider_heard(provider, gpu_names, actor=actor)

    def _grant(self, provider: str) -> ProviderLease:
        """A lease for a new provider, in the place of another's if there are too many."""
        held = [
            HeldLease(
                provider=lease.provider,
                alive=self._is_alive(lease),
                spoken=self._gpus.has_spoken(lease.provider),
                heard_at_ns=lease.heard_at_ns,
            )
            for lease in self._leases.values()
        ]
        if going := rules.giving_way(held, spoken=self._gpus.has_spoken(provider), policy=self._policy):
            del self._leases[going]
            self._watch.forget(going)
        lease = self._leases[provider] = ProviderLease(provider)
        return lease

    def _is_alive(self, lease: ProviderLease) -> bool:
        return self._watch.state(lease.provider) is Liveness.ONLINE

    def _renew(self, lease: ProviderLease) -> None:
        lease.heard_at_ns = self._clock.now_ns()
        for change in self._watch.heard(lease.provider):
            if change.before is Liveness.STALE:
                log.info("gpus.provider_returned", provider=lease.provider)

    async def watch_over(self) -> None:
        """Write down each silence as its lease runs out, until cancelled."""
        async with Boundary() as tasks:
            tasks.keep("gpus/silence", partial(self._watch.run, self._fell_silent))
            tasks.keep("gpus/silence-writes", self._write_silences)

    def _fell_silent(self, change: LivenessChanged) -> None:
        self._leases[change.agent].expiries += 1
        log.warning("gpus.provider_silent", provider=change.agent)
        self._unwritten.add(change.agent)
        self._silence.set()

    async def _write_silences(self) -> None:
        while True:
            await self._silence.wait()
            self._silence.clear()
            for provider in sorted(self._unwritten):
                self._unwritten.discard(provider)  # before: it may fall silent anew while this is written
                if not await self._write_silence(provider):
                    self._unwritten.add(provider)
            if self._unwritten:
                self._silence.set()
                await self._clock.sleep(RETRY_SECONDS)

    async def _write_silence(self, provider: str) -> bool:
        if self._watch.state(provider) is Liveness.ONLINE:
            return True
        try:
            await self._gpus.silence(provider, message=rules.NOT_HEARD_SINCE_LEASE)
        except FleetplaneError as error:
            # A full disk passes; the silence must not be forgotten with it.
            log.error("gpus.silence_not_written", provider=provider, reason=error.reason, error=error.message)
            return False
        return True
