"""Who runs a controller: one holder at a time, decided by the store.

A lease is a resource, taken by a conditional transaction and renewed before it expires. Every
acquisition gets a new term, so that a holder notices when someone else, even of its own name,
has taken over. On a store that only one process can open nobody else can be there: then the
lease is taken at once, and need not be renewed. What a lease guards is the caller's business;
the promise is only that two holders who renew in time never hold the same term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from fleetplane.kernel.clock import Backoff, Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, ResourceExhausted, Unavailable
from fleetplane.kernel.resources import Kind, Nothing
from fleetplane.kernel.store import Draft, Store

R = TypeVar("R")

LEASE_SECONDS = 30.0
"""How long a holder that died keeps others out; it renews three times as often."""
RENEWALS_PER_LEASE = 3
RELEASE_SECONDS = 5.0
"""How long a holder that stops may take to say so; after that the lease runs out by itself."""
HOLDER = "server"
"""The only holder on a store of one process; after a crash the next process has the same name."""
SCOPE = ""
_RETRY = Backoff(first_seconds=0.5, ceiling_seconds=10.0)


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    holder: str
    term: int
    """Counts acquisitions."""
    acquired_at_ns: int
    expires_at_ns: int
    """When others may take it; the moment of acquisition where only one process can be."""


LEASE: Kind[LeaseSpec, Nothing] = Kind("lease", LeaseSpec, Nothing)


class LeaseLost(FailedPrecondition):
    """Someone else has taken over, or it could not be renewed in time."""

    reason = "LEASE_LOST"


class Lease:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        name: str,
        holder: str = HOLDER,
        life_seconds: float | None = None,
    ) -> None:
        """Without `life_seconds` it follows from the store: no expiry where no other process can be."""
        self.name = name
        self.holder = holder
        self._store = store
        self._clock = clock
        self._given_life_seconds = life_seconds
        self._term: int | None = None

    def __repr__(self) -> str:
        return f"<Lease {self.name} holder={self.holder} {'held' if self.held() else 'not held'}>"

    @property
    def _life_seconds(self) -> float | None:
        """None where nobody else wants it: also on a server that has become the one for which that is so."""
        return self._given_life_seconds or (None if self._store.exclusive else LEASE_SECONDS)

    def held(self) -> bool:
        """Whether it is ours now; a lookup in memory."""
        current = self._store.get(LEASE, SCOPE, self.name)
        return (
            self._term is not None
            and current is not None
            and current.spec.term == self._term
            and (self._life_seconds is None or current.spec.expires_at_ns > self._clock.now_ns())
        )

    async def acquire(self) -> None:
        """Wait until it is ours."""
        attempt = 0
        while True:
            try:
                taken, spec = await self._write(self._take, "lease.acquire")
            except (Unavailable, ResourceExhausted):
                wait = _RETRY.delay_seconds(attempt, jitter=self._clock.random())
                attempt += 1
            else:
                if taken:
                    self._term = spec.term
                    return
                attempt = 0
                wait = max(0.0, (spec.expires_at_ns - self._clock.now_ns()) / 1e9)
            await self._clock.sleep(wait)

    async def keep(self) -> None:
        """Renew it for as long as it is ours; raises `LeaseLost` when it is not any more."""
        while self._life_seconds is not None:
            await self._clock.sleep(self._life_seconds / RENEWALS_PER_LEASE)
            # A store that cannot write just now does not end the lease: its expiry does.
            with suppress(Unavailable, ResourceExhausted):
                await self._write(self._renew, "lease.renew")
            self.require()

    def require(self) -> None:
        if not self.held():
            raise LeaseLost(f"{self.holder} no longer holds the lease {self.name}")

    async def release(self) -> None:
        """Let others take it at once. Says nothing if it was lost, or the store is gone."""
        term, self._term = self._term, None
        if term is None or self._life_seconds is None:
            return

        def expire(draft: Draft) -> None:
            current = draft.get(LEASE, SCOPE, self.name)
            if current is not None and current.spec.term == term:
                spec = msgspec.structs.replace(current.spec, expires_at_ns=draft.now_ns)
                draft.put(LEASE, SCOPE, self.name, spec=spec)

        with suppress(FleetplaneError, TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._write(expire, "lease.release")

    # Changes, run by the store.

    def _take(self, draft: Draft) -> tuple[bool, LeaseSpec]:
        """Whether it is ours, and what is in force."""
        current = draft.get(LEASE, SCOPE, self.name)
        if current is None:
            return True, self._put(draft, 1, acquired_at_ns=draft.now_ns)
        spec = current.spec
        if spec.holder != self.holder and spec.expires_at_ns > draft.now_ns:
            return False, spec
        return True, self._put(draft, spec.term + 1, acquired_at_ns=draft.now_ns)

    def _renew(self, draft: Draft) -> None:
        current = draft.get(LEASE, SCOPE, self.name)
        if current is None or current.spec.term != self._term:
            raise LeaseLost(f"the lease {self.name} was taken over")
        self._put(draft, current.spec.term, acquired_at_ns=current.spec.acquired_at_ns)

    def _put(self, draft: Draft, term: int, *, acquired_at_ns: int) -> LeaseSpec:
        spec = LeaseSpec(
            holder=self.holder,
            term=term,
            acquired_at_ns=acquired_at_ns,
            expires_at_ns=draft.now_ns + round((self._life_seconds or 0.0) * 1e9),
        )
        draft.put(LEASE, SCOPE, self.name, spec=spec)
        return spec

    async def _write(self, change: Callable[[Draft], R], action: str) -> R:
        done = await self._store.transact(
            change, actor=f"system/{self.holder}", action=action, touches=[LEASE.key(SCOPE, self.name)]
        )
        return done.value


class LocalLease(Lease):
    """Of a controller that every server runs, each for what is connected to it: nobody else wants it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holder = HOLDER

    def __repr__(self) -> str:
        return f"<LocalLease {self.name}>"

    def held(self) -> bool:
        return True

    async def acquire(self) -> None:
        """At once."""

    async def keep(self) -> None:
        """Until cancelled."""
        await asyncio.get_running_loop().create_future()

    async def release(self) -> None:
        """Nothing to say."""
