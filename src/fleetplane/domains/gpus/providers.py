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

import structlog

from fleetplane.domains.gpus import rules
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, ResourceExhausted, Unimplemented
from fleetplane.kernel.liveness import AgentId, Liveness, LivenessPolicy, LivenessTracker

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
"""Between attempts to write down a silence that could not be written."""


@dataclass(slots=True)
class Lease:
    """What is remembered of one provider while it holds a lease."""

    provider: str
    gpus_named: int = 0
    """In its last heartbeat. The names themselves would be megabytes, if someone wanted them to."""
    heard_at_ns: int = 0
    heartbeats: int = 0
    expiries: int = 0


class Providers:
    def __init__(self, gpus: Gpus, policy: GpuPolicy, clock: Clock) -> None:
        self._gpus = gpus
        self._policy = policy
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._changed = asyncio.Event()
        # A lease has no second stage: silent is silent, so nobody is ever declared dead.
        self._tracker = LivenessTracker(
            LivenessPolicy(stale_after_seconds=policy.lease_seconds or math.inf, dead_after_seconds=math.inf)
        )

    def __repr__(self) -> str:
        return f"<Providers leases={len(self._leases)} {self._tracker!r}>"

    def leases(self) -> Iterator[tuple[Lease, bool]]:
        """Every lease, and whether its holder is alive."""
        for lease in self._leases.values():
            yield lease, self._tracker.state(AgentId(lease.provider)) is Liveness.ONLINE

    def heard(self, provider: str) -> None:
        """Renew the lease of a provider that made any other call."""
        if (lease := self._leases.get(provider)) is not None:
            self._renew(lease)

    async def heartbeat(self, provider: str, gpu_names: frozenset[str], *, actor: str) -> None:
        if self._policy.lease_seconds == 0:
            raise Unimplemented(
                "heartbeat is turned off on this server", hint="set gpus.lease_seconds above 0"
            )
        lease = self._leases.get(provider)
        if lease is None:
            lease = self._grant(provider)
        lease.gpus_named = len(gpu_names)
        lease.heartbeats += 1
        self._renew(lease)
        await self._gpus.provider_heard(provider, gpu_names, actor=actor)

    def _grant(self, provider: str) -> Lease:
        if len(self._leases) >= self._policy.max_providers:
            silent = next((lease.provider for lease, alive in self.leases() if not alive), None)
            if silent is None:
                raise ResourceExhausted(
                    f"{self._policy.max_providers} providers hold leases already",
                    field="provider_id",
                    hint="give each provider one stable provider_id, or raise gpus.max_providers",
                )
            del self._leases[silent]
            self._tracker.forget(AgentId(silent))
        lease = self._leases[provider] = Lease(provider)
        return lease

    def _renew(self, lease: Lease) -> None:
        lease.heard_at_ns = self._clock.now_ns()
        for change in self._tracker.heard_from(AgentId(lease.provider), now=self._clock.monotonic()):
            if change.before is Liveness.STALE:
                log.info("gpus.provider_returned", provider=lease.provider)
        self._changed.set()

    async def watch_over(self) -> None:
        """Write down each silence as its lease runs out, until cancelled."""
        unwritten: set[str] = set()
        while True:
            for change in self._tracker.tick(now=self._clock.monotonic()):
                self._leases[change.agent].expiries += 1
                log.warning("gpus.provider_silent", provider=change.agent)
                unwritten.add(change.agent)
            for provider in sorted(unwritten):
                if await self._write_silence(provider):
                    unwritten.discard(provider)
            await self._until_next_expiry(retry=bool(unwritten))

    async def _write_silence(self, provider: str) -> bool:
        if self._tracker.state(AgentId(provider)) is Liveness.ONLINE:
            return True
        try:
            await self._gpus.silence(provider, message=rules.NOT_HEARD_SINCE_LEASE)
        except FleetplaneError as error:
            # A full disk passes; the silence must not be forgotten with it.
            log.error("gpus.silence_not_written", provider=provider, reason=error.reason, error=error.message)
            return False
        return True

    async def _until_next_expiry(self, *, retry: bool) -> None:
        self._changed.clear()
        wait = self._tracker.next_expiry() - self._clock.monotonic()
        if retry:
            wait = min(wait, RETRY_SECONDS)
        if wait == math.inf:
            await self._changed.wait()
        elif wait > 0:
            await self._clock.sleep(wait)
