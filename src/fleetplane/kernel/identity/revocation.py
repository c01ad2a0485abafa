"""Revocations: certificates and principals that are refused although still valid by themselves.

A revocation names a certificate by its serial or a principal by its name. It is a resource, so
that it is durable, audited and seen by every server; checking is a lookup in the store's
memory. Whoever holds something open for a caller subscribes and is told at once. Does not know
what is open, nor how callers are recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from fleetplane.kernel.boundary import contained
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, NotFound, Unauthenticated
from fleetplane.kernel.resources import Key, Kind, Nothing, Resource
from fleetplane.kernel.store import Draft, Store, follow
from fleetplane.kernel.watch import EventType, Watch

REASON_LIMIT = 1024
SWEEP_BATCH = 256
"""Revocations purged per transaction."""
SCOPE = ""
"""Revocations hold everywhere."""


class RevocationSpec(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    actor: str
    revoked_at_ns: int
    serial: str = ""
    """Of a certificate, in hexadecimal: serials are longer than any integer that is stored."""
    principal: str = ""
    expires_at_ns: int | None = None
    """When what was revoked would have ended anyway, after which nothing is left to refuse."""


REVOCATION: Kind[RevocationSpec, Nothing] = Kind("revocation", RevocationSpec, Nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoked:
    """A revocation, by serial or by principal."""

    serial: int | None
    principal: str | None
    reason: str

    def concerns(self, *, serial: int | None, principal: str) -> bool:
        if self.serial is not None:
            return self.serial == serial
        return self.principal == principal


Subscriber = Callable[[Revoked], None]


class Revocations:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._subscribers: list[Subscriber] = []

    def __repr__(self) -> str:
        return f"<Revocations {len(self._store.list(REVOCATION))}>"

    # Refusing.

    def check(self, *, serial: int | None = None, principal: str | None = None) -> None:
        """Refuse a caller whose certificate or name was revoked."""
        found = self.find(serial=serial, principal=principal)
        if found is not None:
            what = f"certificate {found.serial:x}" if found.serial is not None else str(found.principal)
            raise Unauthenticated(
                f"{what} was revoked: {found.reason}", hint="enrol again", details={"cause": "revoked"}
            )

    def find(self, *, serial: int | None = None, principal: str | None = None) -> Revoked | None:
        for name in _names(serial, principal):
            found = self._store.get(REVOCATION, SCOPE, name)
            if found is not None:
                return _revoked(found)
        return None

    # Revoking.

    async def revoke(
        self,
        *,
        serial: int | None = None,
        principal: str | None = None,
        reason: str,
        actor: str,
        expires_at_ns: int | None = None,
    ) -> None:
        """Refuse a certificate, or everything a principal presents, from now on.

        When this returns it is durable and the subscribers have been told. Revoking again
        changes nothing, but tells them again.
        """
        if (serial is None) == (not principal):
            raise InvalidArgument("revoke either a certificate's serial or a principal")
        if not reason or len(reason) > REASON_LIMIT:
            raise InvalidArgument(f"reason must have 1 to {REASON_LIMIT} characters", field="reason")
        (name,) = _names(serial, principal)
        spec = RevocationSpec(
            reason=reason,
            actor=actor,
            revoked_at_ns=self._clock.now_ns(),
            serial=f"{serial:x}" if serial is not None else "",
            principal=principal or "",
            expires_at_ns=expires_at_ns,
        )

        def change(draft: Draft) -> Resource[RevocationSpec, Nothing]:
            return draft.get(REVOCATION, SCOPE, name) or draft.put(REVOCATION, SCOPE, name, spec=spec)

        done = await self._store.transact(
            change, actor=actor, action="identity.revoke", touches=[REVOCATION.key(SCOPE, name)]
        )
        self._tell(_revoked(done.value))

    async def lift(self, *, serial: int | None = None, principal: str | None = None, actor: str) -> bool:
        """Accept again what was revoked; whether it was."""
        (name,) = _names(serial, principal)
        try:
            await self._store.transact(
                lambda draft: draft.delete(REVOCATION, SCOPE, name),
                actor=actor,
                action="identity.lift-revocation",
                touches=[REVOCATION.key(SCOPE, name)],
            )
        except NotFound:
            return False
        return True

    async def sweep(self, *, actor: str = "system/identity") -> int:
        """Purge revocations of what has ended by itself since; how many."""
        now_ns = self._clock.now_ns()
        ended = [
            found.name
            for found in self._store.list(REVOCATION)
            if found.spec.expires_at_ns is not None and found.spec.expires_at_ns <= now_ns
        ]
        for start in range(0, len(ended), SWEEP_BATCH):
            await self._purge(ended[start : start + SWEEP_BATCH], actor)
        return len(ended)

    async def _purge(self, names: list[str], actor: str) -> None:
        def change(draft: Draft) -> None:
            for name in names:
                if draft.get(REVOCATION, SCOPE, name) is not None:
                    draft.delete(REVOCATION, SCOPE, name)

        await self._store.transact(
            change,
            actor=actor,
            action="identity.sweep-revocations",
            touches=[REVOCATION.key(SCOPE, name) for name in names],
        )

    # Within someone else's transaction, for what must happen together with a revocation.

    def revoke_within(self, draft: Draft, principal: str, *, reason: str, actor: str) -> None:
        """Revoke a principal as part of the caller's transaction, which must touch `revocation_key`.

        Those who watch are told after the commit; `announce` tells them without that delay.
        """
        (name,) = _names(None, principal)
        if draft.get(REVOCATION, SCOPE, name) is None:
            spec = RevocationSpec(
                reason=reason[:REASON_LIMIT], actor=actor, revoked_at_ns=draft.now_ns, principal=principal
            )
            draft.put(REVOCATION, SCOPE, name, spec=spec)

    def lift_within(self, draft: Draft, principal: str) -> None:
        """Accept a principal again, if it was revoked, as part of the caller's transaction."""
        (name,) = _names(None, principal)
        if draft.get(REVOCATION, SCOPE, name) is not None:
            draft.delete(REVOCATION, SCOPE, name)

    def announce(self, principal: str) -> None:
        """Tell of a principal's revocation now, if it is revoked."""
        found = self.find(principal=principal)
        if found is not None:
            self._tell(found)

    # Telling.

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Have every revocation told, possibly more than once; returns how to stop that.

        Called in the event loop, between two of its turns: it must not block, nor raise.
        """
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    async def run(self) -> None:
        """Tell of revocations that were made elsewhere: on another server, or by a caller that left."""

        def all_of_them(_watch: Watch) -> None:
            for found in self._store.list(REVOCATION):
                self._tell_contained(found)

        async for batch in follow(self._store, REVOCATION, begin=all_of_them):
            for event in batch.events:
                if event.type is not EventType.DELETED:
                    self._tell_contained(event.resource)

    def _tell_contained(self, found: Resource[RevocationSpec, Nothing]) -> None:
        with contained("revocations", about=found.name):
            self._tell(_revoked(found))

    def _tell(self, revoked: Revoked) -> None:
        for subscriber in tuple(self._subscribers):
            subscriber(revoked)


def revocation_key(principal: str) -> Key:
    """What a transaction that revokes a principal, or lifts that, touches."""
    (name,) = _names(None, principal)
    return REVOCATION.key(SCOPE, name)


def _names(serial: int | None, principal: str | None) -> list[str]:
    names = []
    if serial is not None:
        names.append(f"serial/{serial:x}")
    if principal:
        names.append(f"principal/{principal}")
    return names


def _revoked(found: Resource[RevocationSpec, Nothing]) -> Revoked:
    spec = found.spec
    return Revoked(
        serial=int(spec.serial, 16) if spec.serial else None,
        principal=spec.principal or None,
        reason=spec.reason,
    )
