"""A transaction while it is being decided.

A change is a function of a draft: it reads the state that its predecessors leave behind, says
what should be different, and may raise to leave everything as it was. The draft decides what
that amounts to; it does not know when or whether it becomes durable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Final, Generic, Literal, Protocol, TypeVar

import msgspec

from fleetplane.kernel.access import covers
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    Conflict,
    FleetplaneError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from fleetplane.kernel.resources import (
    BODY_LIMIT_BYTES,
    AnyKind,
    AnyResource,
    Condition,
    Key,
    Kind,
    Resource,
    SpecT,
    StatusT,
    check_key,
    check_labels,
    check_text,
    encode,
)
from fleetplane.kernel.store.engine import Claim
from fleetplane.kernel.store.servers import level
from fleetplane.kernel.watch import Event, EventType

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

CLAIM_LIMIT_BYTES = 1024
"""Of a claimed value, and of its owner."""
SECRET_NAME_LIMIT_BYTES = 256
UID_BYTES = 16


class DraftExpectation(Enum):
    ABSENT = "absent"


ABSENT: Final = DraftExpectation.ABSENT
"""The precondition that there is no such resource."""

Expect = int | Literal[DraftExpectation.ABSENT] | None
"""What must be true before a write: at this revision, absent, or anything (None)."""


class UndeclaredChange(FleetplaneError):
    """A change touched a resource that it had not announced. A mistake in the program."""

    reason = "UNDECLARED_CHANGE"


class Committed(msgspec.Struct, Generic[R_co], frozen=True, kw_only=True):
    """The answer to a transaction: everything it saw and did is durable."""

    value: R_co
    revision: int
    """The last of this transaction; the store's, if it changed nothing."""


class ResourceCounts:
    """By how many the resources of each kind and scope differ from those of the state below."""

    __slots__ = ("_more",)

    def __init__(self) -> None:
        self._more: dict[str, dict[str, int]] = {}

    def add(self, key: Key, more: int) -> None:
        scopes = self._more.setdefault(key.kind, {})
        scopes[key.scope] = scopes.get(key.scope, 0) + more

    def of(self, kind: str, scope: str) -> int:
        return sum(more for at, more in self._more.get(kind, {}).items() if covers(scope, at))


class DraftSource(Protocol):
    """The state that a draft starts from."""

    def get(self, key: Key) -> AnyResource | None: ...

    def list(self, kind: str, scope: str) -> Sequence[AnyResource]: ...

    def count(self, kind: str, scope: str) -> int: ...

    def owner(self, claim: Claim) -> str | None: ...


class DraftChange(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One resource's difference, with the body to be stored."""

    key: Key
    event: Event
    body: bytes


class DraftChanges(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a finished draft amounts to."""

    resources: Sequence[DraftChange]
    """In the order of their revisions."""
    claims: Mapping[Claim, str | None]
    """The new owner; None if released."""
    secrets: Mapping[str, bytes | None]
    notes: Sequence[audit.AuditedChange] = ()
    """For the audit log alone."""

    @property
    def takes_revision(self) -> bool:
        return bool(self.resources or self.claims)

    def __bool__(self) -> bool:
        return self.takes_revision or bool(self.secrets or self.notes)


class Draft:
    """What a change reads from and writes to."""

    def __init__(self, ground: DraftSource, *, revision: int, clock: Clock) -> None:
        self.revision = revision
        """The first that this transaction will get, if it changes anything; each change has its own."""
        self._next = revision
        self.now_ns = clock.now_ns()
        self._ground = ground
        self._clock = clock
        self._resources: dict[Key, AnyResource | None] = {}
        self._before: dict[Key, AnyResource | None] = {}
        """Of each that was put or deleted: what was there before this transaction."""
        self._counts = ResourceCounts()
        self._renewed: set[Key] = set()
        self._deleted_at: dict[Key, int] = {}
        """The revision of the deletion of what was there before this transaction."""
        self._claims: dict[Claim, str | None] = {}
        self._secrets: dict[str, bytes | None] = {}
        self._notes: list[audit.AuditedChange] = []

    def __repr__(self) -> str:
        return f"<Draft revision={self.revision} changes={len(self._resources)}>"

    # Resources.

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None:
        return self._get(Key(kind.name, scope, name))

    def _get(self, key: Key) -> AnyResource | None:
        return self._resources[key] if key in self._resources else self._ground.get(key)

    @property
    def level(self) -> int:
        """Of the store: fields and kinds that a later one brings must not be written yet."""
        return level.of(self._ground.get(level.KEY))

    def _check_level(self, kind: AnyKind) -> None:
        if self.level < kind.since_level:
            raise Unavailable(
                f"{kind.name} cannot be written yet: the store is at level {self.level}, and this needs"
                f" {kind.since_level}",
                hint="upgrade every server; the level rises once all of them support it",
            )

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]:
        return merged(self._ground.list(kind.name, scope), self._resources, kind.name, scope)

    def count(self, kind: AnyKind, scope: str = "") -> int:
        """How many there are at or below a scope; costs the same however many there are."""
        return self._ground.count(kind.name, scope) + self._counts.of(kind.name, scope)

    def put(
        self,
        kind: Kind[SpecT, StatusT],
        scope: str,
        name: str,
        *,
        spec: SpecT,
        status: StatusT | None = None,
        conditions: Iterable[Condition] = (),
        labels: Mapping[str, str] | None = None,
        expect: Expect = None,
        renew: bool = False,
    ) -> Resource[SpecT, StatusT]:
        """State the whole of a resource; labels left None stay as they are.

        Saying again what is so already changes nothing, unless `renew` asks for a new revision.
        """
        key = Key(kind.name, scope, name)
        if kind.since_level > level.FIRST:
            self._check_level(kind)
        current = self._get(key)
        if current is None:  # what is there has been checked
            check_key(key)
        if expect is not None:
            _check_expectation(key, current, expect)
        if labels is None:
            labels = current.labels if current is not None else {}
        elif current is None or labels is not current.labels:
            check_labels(labels)
            labels = dict(labels)
        before = self._before[key] if key in self._resources else current
        fresh = self._resources.get(key) is None
        revision = self._next if fresh or current is None else current.revision
        reborn = current is None or before is None or current.uid != before.uid
        made: Resource[SpecT, StatusT] = Resource(
            kind=kind.name,
            scope=scope,
            name=name,
            uid=current.uid if current is not None else self._clock.token_bytes(UID_BYTES).hex(),
            labels=labels,
            spec=spec,
            status=status,
            conditions=tuple(conditions),
            revision=revision,
            created_revision=current.created_revision if current is not None else revision,
            generation=1 if reborn or before is None else before.generation + (spec != before.spec),
            created_at_ns=current.created_at_ns if current is not None else self.now_ns,
            updated_at_ns=self.now_ns,
        )
        if renew:
            self._renewed.add(key)
        elif current is not None and _same_content(current, made):
            return current
        if current is None:
            self._counts.add(key, 1)
        self._next += fresh
        self._before[key] = before
        self._resources[key] = made
        return made

    def rewrite(self, key: Key) -> None:
        """Store a resource again as it is, under a new revision: in the form that it has by now."""
        current = self._get(key)
        if current is not None and key not in self._resources:
            self._before[key] = current
            self._resources[key] = msgspec.structs.replace(current, revision=self._next)
            self._renewed.add(key)
            self._next += 1

    def delete(
        self, kind: Kind[SpecT, StatusT], scope: str, name: str, *, expect: int | None = None
    ) -> Resource[SpecT, StatusT]:
        """Remove a resource; returns its last state under the deletion's revision."""
        key = Key(kind.name, scope, name)
        current = self._get(key)
        if current is None:
            raise NotFound(f"{key} does not exist")
        _check_expectation(key, current, expect)
        self._counts.add(key, -1)
        if self._resources.get(key) is None:
            revision, self._next = self._next, self._next + 1
        else:
            revision = current.revision
        self._deleted_at.setdefault(key, revision)
        self._before.setdefault(key, current)
        self._resources[key] = None
        return self._buried(current, revision)

    def _buried(self, last: AnyResource, revision: int) -> AnyResource:
        return msgspec.structs.replace(last, revision=revision, updated_at_ns=self.now_ns)

    def differences(self) -> Iterator[tuple[AnyResource | None, AnyResource | None]]:
        """Each resource that was put or deleted so far, as it was before and as it is now."""
        for key, after in self._resources.items():
            yield self._before[key], after

    # Claims.

    def claimed_by(self, kind: AnyKind, scope: str, field: str, value: str) -> str | None:
        return self._owner(Claim(kind.name, scope, field, value))

    def _owner(self, claim: Claim) -> str | None:
        return self._claims[claim] if claim in self._claims else self._ground.owner(claim)

    def claim(self, kind: AnyKind, scope: str, field: str, value: str, owner: str) -> None:
        """Take a value that must be unique. Claiming what one holds already changes nothing."""
        claim = Claim(kind.name, scope, field, value)
        for part, text in (("field", field), ("value", value), ("owner", owner)):
            check_text(part, text, CLAIM_LIMIT_BYTES)
        holder = self._owner(claim)
        if holder is None:
            self._claims[claim] = owner
        elif holder != owner:
            raise AlreadyExists(
                f"{field} {value!r} of {kind.name} is taken" + (f" in {scope}" if scope else ""),
                field=field,
                details={"kind": kind.name, "scope": scope, "field": field, "value": value},
            )

    def release(self, kind: AnyKind, scope: str, field: str, value: str, owner: str) -> None:
        """Give up a claim. Releasing what nobody holds changes nothing."""
        claim = Claim(kind.name, scope, field, value)
        holder = self._owner(claim)
        if holder is None:
            return
        if holder != owner:
            raise Conflict(f"{field} {value!r} of {kind.name} is not held by {owner}", field=field)
        self._claims[claim] = None

    # Secrets: durable with the transaction and audited by name, but no resources.

    def put_secret(self, name: str, blob: bytes) -> None:
        check_text("name", name, SECRET_NAME_LIMIT_BYTES)
        if len(blob) > BODY_LIMIT_BYTES:
            raise InvalidArgument(f"secret {name} takes {len(blob)} bytes, more than {BODY_LIMIT_BYTES}")
        self._secrets[name] = blob

    def delete_secret(self, name: str) -> None:
        check_text("name", name, SECRET_NAME_LIMIT_BYTES)
        self._secrets[name] = None

    # The audit log.

    def note(self, operation: str, name: str, digest: str = "") -> None:
        """Have something said in the audit log that is no change of the store."""
        self._notes.append(audit.AuditedChange(operation, "", "", name, digest))

    # For the writer.

    def finish(
        self, touches: Collection[Key], encode: Callable[[AnyResource], bytes] = encode
    ) -> DraftChanges:
        """The net difference; refuses one that was not announced.

        What was written and then taken back leaves its revision unused.
        """
        resources: list[DraftChange] = []
        for key, after in self._resources.items():
            for kind, told in self._difference(key, self._before[key], after, touches):
                event = Event(type=kind, resource=told, revision=told.revision)
                resources.append(DraftChange(key=key, event=event, body=encode(told)))
        if len(resources) > 1:
            resources.sort(key=lambda change: change.event.revision)
        return DraftChanges(
            resources=resources,
            claims={
                claim: owner for claim, owner in self._claims.items() if owner != self._ground.owner(claim)
            },
            secrets=self._secrets,
            notes=self._notes,
        )

    def _difference(
        self, key: Key, before: AnyResource | None, after: AnyResource | None, touches: Collection[Key]
    ) -> Iterable[tuple[EventType, AnyResource]]:
        same = before is not None and after is not None and before.uid == after.uid
        if before is after:
            return
        if same and key not in self._renewed and _same_content(before, after):  # type: ignore[arg-type]
            return
        if key not in touches:
            raise UndeclaredChange(f"{key} was changed by a transaction that does not name it in its touches")
        if before is not None and not same:
            yield EventType.DELETED, self._buried(before, self._deleted_at[key])
        if after is not None:
            yield EventType.MODIFIED if same else EventType.ADDED, after


def merged(
    base: Sequence[AnyResource], overlay: Mapping[Key, AnyResource | None], kind: str, scope: str
) -> Sequence[AnyResource]:
    """`base` as it looks with the overlay's puts and deletes (None) of that kind and scope."""
    relevant = {key: put for key, put in overlay.items() if key.kind == kind and covers(scope, key.scope)}
    if not relevant:
        return base
    found: dict[Key, AnyResource | None] = {resource.key: resource for resource in base}
    found.update(relevant)
    return [put for _, put in sorted(found.items()) if put is not None]


def audited(changes: DraftChanges) -> tuple[audit.AuditedChange, ...]:
    """What the audit says of a transaction's changes: names and digests, no content."""
    entries = [
        audit.AuditedChange("delete", *change.key, "")
        if change.event.type is EventType.DELETED
        else audit.AuditedChange("put", *change.key, audit.digest(change.body))
        for change in changes.resources
    ]
    for claim, owner in changes.claims.items():
        operation, digest = ("release", "") if owner is None else ("claim", audit.digest(owner.encode()))
        entries.append(
            audit.AuditedChange(operation, claim.kind, claim.scope, f"{claim.field}={claim.value}", digest)
        )
    for name, blob in changes.secrets.items():
        operation, digest = ("secret.delete", "") if blob is None else ("secret.put", audit.digest(blob))
        entries.append(audit.AuditedChange(operation, "", "", name, digest))
    return (*entries, *changes.notes)


def _same_content(one: AnyResource, other: AnyResource) -> bool:
    return bool(
        one.spec == other.spec
        and one.status == other.status
        and one.conditions == other.conditions
        and one.labels == other.labels
    )


def _check_expectation(key: Key, current: AnyResource | None, expect: Expect) -> None:
    if expect is None:
        return
    if expect is ABSENT:
        if current is not None:
            raise AlreadyExists(f"{key} exists already", details={"revision": str(current.revision)})
        return
    if current is None:
        raise NotFound(f"{key} does not exist")
    if current.revision != expect:
        raise Conflict(
            f"{key} is at revision {current.revision}, not {expect}",
            details={"revision": str(current.revision)},
        )


ChangeFunction = Callable[[Draft], R]
