"""A change that is tried before it is made: on a draft that notes what it reads and is never written itself.

A domain's change is a pure function of a draft. Run on a rehearsal's draft it shows what it would do, which
is what a plan tells and a dry run answers. Carried out, the outcome is written in one transaction of the
store, after that transaction has seen that everything which was read is still as it was: by purity the change
would do the same again. So the single writer only compares and writes, however much there was to decide,
changes of several domains become one transaction, and nothing is lost that others did meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Protocol, TypeVar

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Conflict
from fleetplane.kernel.resources import AnyKind, AnyResource, Key, Kind, Nothing, Resource, SpecT, StatusT
from fleetplane.kernel.store import Claim, Committed, Draft, Store
from fleetplane.kernel.store.store import SYSTEM
from fleetplane.kernel.watch import EventType

R = TypeVar("R")
Written = Mapping[Key, AnyResource]
"""What a transaction has put, by key."""

ATTEMPTS = 5
"""Rehearsals of one change before it is given up: each is beaten only by a transaction of somebody else."""
SHARED_ATTEMPTS = 25
"""The same where other servers write to the same database, and this one learns of it a moment later."""
PAUSE_SECONDS = 0.05
"""At most, before a further rehearsal there: so that two servers do not beat each other for ever."""
BREATH_SECONDS = 0.01
"""How long a rehearsal may hold the event loop before it lets others have it."""


class StoreReader(Protocol):
    """What the store and a draft of it have in common for those who only read."""

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None: ...

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]: ...

    def count(self, kind: AnyKind, scope: str = "") -> int: ...

    def claimed_by(self, kind: AnyKind, scope: str, field: str, value: str) -> str | None: ...


class Stale(Conflict):
    """Something that a rehearsal read was changed before its outcome could be written."""

    reason = "STALE"


@cache
def _kind(name: str) -> AnyKind:
    """Stands for the kind of that name where nothing is decoded."""
    return Kind(name, Nothing, Nothing)


class Reads:
    """Everything that a rehearsal looked at, as it was at the first look."""

    def __init__(self) -> None:
        self.resources: dict[Key, AnyResource | None] = {}
        self.lists: dict[tuple[str, str], Sequence[AnyResource]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._owners: dict[Claim, str | None] = {}

    def __repr__(self) -> str:
        return f"<Reads resources={len(self.resources)} lists={len(self.lists)}>"

    def moved(self, now: StoreReader) -> Iterator[str]:
        """What is otherwise by now, in words."""
        for key, before in self.resources.items():
            if _revision(before) != _revision(now.get(_kind(key.kind), key.scope, key.name)):
                yield str(key)
        for (kind, scope), listed in self.lists.items():
            found = now.list(_kind(kind), scope)
            if found is not listed and list(map(_identity, found)) != list(map(_identity, listed)):
                yield f"the list of {kind} in {scope or 'all scopes'}"
        for (kind, scope), number in self._counts.items():
            if now.count(_kind(kind), scope) != number:
                yield f"the number of {kind} in {scope or 'all scopes'}"
        for claim, owner in self._owners.items():
            if now.claimed_by(_kind(claim.kind), claim.scope, claim.field, claim.value) != owner:
                yield f"who has {claim.field} {claim.value!r} of {claim.kind}"


def _revision(resource: AnyResource | None) -> int:
    return 0 if resource is None else resource.revision


def _identity(resource: AnyResource) -> tuple[Key, int]:
    return resource.key, resource.revision


class _Noting:
    """The store as a draft's source; what was looked at once stays as it was then."""

    def __init__(self, store: StoreReader, reads: Reads) -> None:
        self._store = store
        self._reads = reads

    def get(self, key: Key) -> AnyResource | None:
        seen = self._reads.resources
        if key not in seen:
            seen[key] = self._store.get(_kind(key.kind), key.scope, key.name)
        return seen[key]

    def list(self, kind: str, scope: str) -> Sequence[AnyResource]:
        seen, at = self._reads.lists, (kind, scope)
        if at not in seen:
            seen[at] = self._store.list(_kind(kind), scope)
        return seen[at]

    def count(self, kind: str, scope: str) -> int:
        seen, at = self._reads._counts, (kind, scope)
        if at not in seen:
            seen[at] = self._store.count(_kind(kind), scope)
        return seen[at]

    def owner(self, claim: Claim) -> str | None:
        seen = self._reads._owners
        if claim not in seen:
            seen[claim] = self._store.claimed_by(_kind(claim.kind), claim.scope, claim.field, claim.value)
        return seen[claim]


class _Everything(frozenset[Key]):
    def __contains__(self, _key: object) -> bool:
        return True


class Rehearsal:
    """One try of a change. Use it once."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self.reads = Reads()
        self.draft = Draft(_Noting(store, self.reads), revision=store.revision + 1, clock=clock)
        self.revision = store.revision
        self._since = time.monotonic()

    def __repr__(self) -> str:
        return f"<Rehearsal at {self.revision} {self.reads!r}>"

    async def breathe(self) -> None:
        """Between two steps of a long change: let others run. What they change is seen at the end."""
        if time.monotonic() - self._since > BREATH_SECONDS:
            await asyncio.sleep(0)
            self._since = time.monotonic()

    async def carry_out(self, finish: Callable[[Written], R], *, actor: str, action: str) -> Committed[R]:
        """Write the outcome in one transaction; `Stale` if anything read has moved.

        `finish` makes the transaction's value of what was written.
        """
        changes = self.draft.finish(_Everything())
        resources = [change.event for change in changes.resources]
        reads = self.reads

        def change(draft: Draft) -> R:
            if moved := next(reads.moved(draft), None):
                raise Stale(f"{moved} was changed meanwhile")
            written: dict[Key, AnyResource] = {}
            for event in resources:
                made, kind = event.resource, _kind(event.resource.kind)
                if event.type is EventType.DELETED:
                    draft.delete(kind, made.scope, made.name)
                else:
                    written[made.key] = draft.put(
                        kind,
                        made.scope,
                        made.name,
                        spec=made.spec,
                        status=made.status,
                        conditions=made.conditions,
                        labels=made.labels,
                    )
            _settle_claims(draft, changes.claims)
            for name, blob in changes.secrets.items():
                if blob is None:
                    draft.delete_secret(name)
                else:
                    draft.put_secret(name, blob)
            for note in changes.notes:
                draft.note(note.operation, note.name, note.digest)
            return finish(written)

        touches = {event.resource.key for event in resources}
        return await self._store.transact(change, actor=actor, action=action, touches=touches)


def _settle_claims(draft: Draft, claims: Mapping[Claim, str | None]) -> None:
    """Releases first: a value may pass from one owner to another."""
    for claim, owner in claims.items():
        holder = draft.claimed_by(_kind(claim.kind), claim.scope, claim.field, claim.value)
        if holder is not None and holder != owner:
            draft.release(_kind(claim.kind), claim.scope, claim.field, claim.value, holder)
    for claim, owner in claims.items():
        if owner is not None:
            draft.claim(_kind(claim.kind), claim.scope, claim.field, claim.value, owner)


async def _rehearsals(store: Store, clock: Clock) -> AsyncIterator[Rehearsal]:
    for number in range(SHARED_ATTEMPTS if store.shared else ATTEMPTS):
        if number and store.shared:
            await clock.sleep(clock.random() * PAUSE_SECONDS)
        yield Rehearsal(store, clock)


async def rehearsed(store: Store, clock: Clock, change: Callable[[Rehearsal], Awaitable[R]]) -> R:
    """What a change would do, written nowhere, and true of one moment of the store."""
    async for rehearsal in _rehearsals(store, clock):
        value = await change(rehearsal)
        if next(rehearsal.reads.moved(store), None) is None:
            return value
    raise Conflict("others keep changing what this depends on", hint="try again")


async def carried_out(
    store: Store,
    clock: Clock,
    change: Callable[[Rehearsal], Awaitable[Callable[[Written], R]]],
    *,
    actor: str,
    action: str,
) -> Committed[R]:
    """Rehearse a change and write its outcome; again from the start if somebody came in between.

    The change returns what makes the answer of what was written.
    """
    async for rehearsal in _rehearsals(store, clock):
        finish = await change(rehearsal)
        try:
            return await rehearsal.carry_out(finish, actor=actor, action=action)
        except Stale:
            # Wait for what was accepted before, so that the next rehearsal sees it.
            await store.transact(lambda _: None, actor=SYSTEM, action="plan.settle", touches=())
    raise Conflict("others keep changing what this depends on", hint="try again")
