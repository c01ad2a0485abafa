"""Which providers are alive, where several servers hear them in part.

Providers call whichever server a balancer gives them. Who holds a lease, and whose has run out, is stored
(`leases.py`); when a provider was last heard is in the table of `kernel/presence/last_seen.py`, which all
servers write to. Only the leader declares silence, from that table. A provider that is heard again is
recorded in the same transaction that makes its conditions readable, on any server.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import structlog

from fleetplane.domains.gpus import leases, rules
from fleetplane.domains.gpus.kinds import SCOPE
from fleetplane.domains.gpus.leases import PROVIDER_LEASE, StoredLease, is_silent, lease_key
from fleetplane.domains.gpus.providers import ProviderLease, check_leases_are_on
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.kernel.boundary import Boundary, contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.presence.last_seen import LATE_SECONDS, WRITE_SECONDS, LastSeen
from fleetplane.kernel.resources import Key
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.values.times import NS
from fleetplane.kernel.watch import EventType

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
"""Between two looks at the table, where leases last long enough: as often as servers write to it."""
LOOKS = 6
"""In the time of a lease, at least."""
LEEWAY_SECONDS = WRITE_SECONDS + LATE_SECONDS
"""Beyond its lease that a provider may be unheard: until the server that hears it has written that down."""
CHANNEL = "gpus"


@dataclass(slots=True, kw_only=True)
class _Here:
    """What this server has heard of a provider."""

    heard_at: float
    """On the monotonic clock."""
    heard_at_ns: int
    heartbeats: int = 0
    gpus_named: int = 0


class SharedProviders:
    """See `ProviderLeases`."""

    def __init__(self, store: Store, gpus: Gpus, policy: GpuPolicy, clock: Clock, heard: LastSeen) -> None:
        self._store = store
        self._gpus = gpus
        self._policy = policy
        self._clock = clock
        self._heard = heard
        self._here: dict[str, _Here] = {}
        self._anywhere: dict[str, int] = {}
        """When each was last heard by any server, by the wall clock, as of the last look."""
        self._leads = False

    def __repr__(self) -> str:
        return f"<SharedProviders leases={self._store.count(PROVIDER_LEASE, SCOPE)} here={len(self._here)}>"

    def leases(self) -> Iterator[tuple[ProviderLease, bool]]:
        """Every lease, and whether its holder is alive."""
        for stored in self._store.list(PROVIDER_LEASE, SCOPE):
            here = self._here.get(stored.name)
            lease = ProviderLease(
                provider=stored.name,
                is_partial=True,
                heard_at_ns=max(
                    here.heard_at_ns if here is not None else 0,
                    self._anywhere.get(stored.name, 0),
                    0 if is_silent(stored) else stored.updated_at_ns,
                ),
                expiries=leases.status_of(stored).expiries,
            )
            if here is not None:
                lease.heartbeats, lease.gpus_named = here.heartbeats, here.gpus_named
            yield lease, not is_silent(stored)

    # What is heard.

    def heard(self, provider: str) -> None:
        """Renew the lease of a provider that made any other call."""
        if self._stored(provider) is not None:
            self._note(provider)

    async def heartbeat(self, provider: str, gpu_names: frozenset[str], *, actor: str) -> None:
        """Grant or renew its lease, and let what it had said be read again."""
        check_leases_are_on(self._policy)
        stored = self._stored(provider)
        beside: Callable[[Draft], None] | None = None
        touches: list[Key] = []
        if stored is None:
            beside, touches = self._granting(provider)
        elif is_silent(stored):
            beside, touches = partial(leases.revive, provider=provider), [lease_key(provider)]
            log.info("gpus.provider_returned", provider=provider)
        await self._gpus.provider_heard(provider, gpu_names, actor=actor, beside=beside, touches=touches)
        here = self._note(provider)
        here.heartbeats += 1
        here.gpus_named = len(gpu_names)

    def _granting(self, provider: str) -> tuple[Callable[[Draft], None], list[Key]]:
        known: Collection[str] = [one.name for one in self._store.list(PROVIDER_LEASE, SCOPE)]
        if len(known) < max(1, self._policy.max_providers // 2):
            known = ()  # there is room, and nobody has to give way
        change = partial(
            leases.grant, provider=provider, spoken=self._gpus.writers(), known=known, policy=self._policy
        )
        return change, [lease_key(one) for one in (provider, *known)]

    def _note(self, provider: str) -> _Here:
        self._heard.note(provider)
        now, now_ns = self._clock.monotonic(), self._clock.now_ns()
        here = self._here.get(provider)
        if here is None:
            here = self._here[provider] = _Here(heard_at=now, heard_at_ns=now_ns)
        here.heard_at, here.heard_at_ns = now, now_ns
        return here

    def _stored(self, provider: str) -> StoredLease | None:
        return self._store.get(PROVIDER_LEASE, SCOPE, provider)

    # Life.

    async def forget(self) -> None:
        """Take all leases back: nobody was there to hear who held them."""
        names = [one.name for one in self._store.list(PROVIDER_LEASE, SCOPE)]

        def change(draft: Draft) -> None:
            for name in names:
                if draft.get(PROVIDER_LEASE, SCOPE, name) is not None:
                    draft.delete(PROVIDER_LEASE, SCOPE, name)

        if names:
            touches = [lease_key(name) for name in names]
            await self._store.transact(change, actor="system/gpus", action="gpus.leases", touches=touches)

    def take_over(self) -> None:
        """Do from now on what one server does for all: write each silence down."""
        self._leads = True
        self._heard.begin_to_judge()

    async def run_here(self) -> None:
        """What every server does, until cancelled; and what one does for all, once it is this one."""
        async with Boundary() as tasks:
            tasks.keep("gpus/heard", self._heard.run_here)
            tasks.keep("gpus/leases", self._follow)
            tasks.keep("gpus/look", self._look)

    async def _follow(self) -> None:
        """Undo a silence that was declared while this server heard the provider.

        One server forgets when those were heard that have lost their lease: names cost nothing, so that
        whoever makes them up would leave more behind than leases there are.
        """
        async with self._store.watch(PROVIDER_LEASE, SCOPE) as watch:
            async for batch in watch:
                for event in batch.events:
                    provider = event.resource.name
                    with contained("gpus/leases", about=provider):
                        if event.type is EventType.DELETED:
                            self._here.pop(provider, None)
                            if self._leads:
                                await self._forget(provider)
                        elif self._hears(provider) and is_silent(self._stored(provider)):
                            await self._return(provider)

    async def _forget(self, provider: str) -> None:
        if self._stored(provider) is not None:  # it has another lease by now
            return
        try:
            await self._heard.forget(provider)
        except FleetplaneError as error:  # it is forgotten later, with whoever was not heard for long
            log.warning("gpus.provider_not_forgotten", provider=provider, error=error.message)

    def _hears(self, provider: str) -> bool:
        here = self._here.get(provider)
        return here is not None and (self._clock.monotonic() - here.heard_at < self._policy.lease_seconds)

    async def _return(self, provider: str) -> None:
        try:
            await self._gpus.provider_heard(
                provider,
                (),
                actor="system/gpus",
                beside=partial(leases.revive, provider=provider),
                touches=[lease_key(provider)],
            )
        except FleetplaneError as error:  # its next heartbeat does it
            log.warning("gpus.return_not_written", provider=provider, error=error.message)

    async def _look(self) -> NoReturn:
        lease_seconds = self._policy.lease_seconds
        often = min(LOOK_SECONDS, max(0.5, lease_seconds / LOOKS))
        while True:
            judges = self._leads and lease_seconds > 0
            await self._clock.sleep(often if judges else LOOK_SECONDS)
            if not self._store.count(PROVIDER_LEASE, SCOPE):
                continue
            try:
                ages = await self._heard.read()
                now_ns = self._clock.now_ns()
                self._anywhere = {name: now_ns - round(age * NS) for name, age in ages.items()}
                if judges:
                    await self._judge(now_ns)
            except FleetplaneError as error:
                # Nobody's silence while the database is away; a full disk passes, and it is tried again.
                log.warning("gpus.silence_not_judged", reason=error.reason, error=error.message)

    async def _judge(self, now_ns: int) -> None:
        limit_seconds = self._policy.lease_seconds + LEEWAY_SECONDS
        if not self._heard.is_settled(limit_seconds):
            return
        limit_ns = round(limit_seconds * NS)
        for stored in self._store.list(PROVIDER_LEASE, SCOPE):
            heard_at_ns = max(self._anywhere.get(stored.name, 0), stored.updated_at_ns)
            if is_silent(stored) or now_ns - heard_at_ns < limit_ns or self._hears(stored.name):
                continue
            log.warning("gpus.provider_silent", provider=stored.name)
            await self._gpus.silence(stored.name, message=rules.NOT_HEARD_SINCE_LEASE, lease=stored.revision)
