"""Groups of transactions: run one after another, written together, then applied to memory.

`GroupState` is pure: from the state in memory it computes the answer of each transaction, the rows
for the database, and the state of memory once the rows are durable. `Applier` is the only place where the
view, the claims and the hub change: by group number, each group exactly once, in one step without an
await, so that readers and watches see whole groups. It applies groups of this process from memory,
and groups of other servers from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

import msgspec
import structlog

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import IntegrityError
from fleetplane.kernel.resources import AnyKind, AnyResource, Key, bare, encode
from fleetplane.kernel.store import engine
from fleetplane.kernel.store.draft import Draft, DraftChanges, ResourceCounts, audited, merged
from fleetplane.kernel.store.engine import (
    ALONE,
    ArchiveCut,
    Claim,
    Claimed,
    ClaimRow,
    DatabaseMark,
    GroupAuthor,
    LoggedGroup,
    LogRow,
    LogType,
    ResourceRow,
    SecretChanged,
    SecretRow,
    WriteGroup,
)
from fleetplane.kernel.store.servers import level
from fleetplane.kernel.store.view import StoreView
from fleetplane.kernel.watch import Event, EventType, Hub

log = structlog.get_logger(__name__)

_TYPES = {sort: sort.value for sort in EventType}
ID_BYTES = 16
ROWS_LIMIT = 2000
"""Changes in a group; it takes no further transaction then."""
BYTES_LIMIT = 1024 * 1024
"""Of the bodies in it, likewise."""


class TransactionResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one transaction answers, if the group becomes durable."""

    value: object
    error: Exception | None
    revision: int
    depends: bool
    """Whether it did or saw anything of the group, so that its answer is void without it."""


class GroupState:
    """The state after each transaction of a group, on top of what is durable."""

    def __init__(
        self,
        view: StoreView,
        mark: DatabaseMark,
        clock: Clock,
        audit_key: bytes = b"",
        author: GroupAuthor = ALONE,
    ) -> None:
        self.id = clock.token_bytes(ID_BYTES)
        self.author = author
        self._view = view
        self._unlogged = view.unlogged
        self._clock = clock
        self._audit_key = audit_key
        self._before = mark
        self._revision = mark.revision
        self._compacted = mark.compacted
        self._audit: list[audit.Row] = []
        self._resources: dict[Key, AnyResource | None] = {}
        self._counts = ResourceCounts()
        self._bodies: dict[Key, bytes] = {}
        self._cut: ArchiveCut | None = None
        self._claims: dict[Claim, str | None] = {}
        self._secrets: dict[str, SecretRow | None] = {}
        self._rows: list[LogRow] = []
        self._size = 0
        self.events: list[Event] = []
        self.transactions = 0
        """That changed something."""

    # The ground of each draft.

    def get(self, key: Key) -> AnyResource | None:
        found = self._resources.get(key)
        return self._view.get(key) if found is None and key not in self._resources else found

    def list(self, kind: str, scope: str) -> Sequence[AnyResource]:
        return merged(self._view.of(kind).list(scope), self._resources, kind, scope)

    def count(self, kind: str, scope: str) -> int:
        return self._view.of(kind).count(scope) + self._counts.of(kind, scope)

    def owner(self, claim: Claim) -> str | None:
        return self._claims[claim] if claim in self._claims else self._view.claims.get(claim)

    def _encode(self, resource: AnyResource) -> bytes:
        """As it is stored: sealed if it may hold secrets, and everybody who reads it can open it."""
        sealer = self._view.sealers.get(resource.kind)
        if sealer is None or not level.sealed_since(self.get(level.KEY)):
            return encode(resource)
        return encode(resource, sealer)

    # Running.

    def run(
        self, change: Callable[[Draft], object], *, actor: str, action: str, touches: Collection[Key]
    ) -> TransactionResult:
        """Run one transaction; if it raises, nothing of it remains."""
        depends = bool(self._audit)
        draft = Draft(self, revision=self._revision + 1, clock=self._clock)
        try:
            value = change(draft)
            if isinstance(value, Coroutine):
                value.close()
                raise TypeError("a change is a plain function: it runs inside the writer and cannot wait")
            changes = draft.finish(touches, self._encode)
        except Exception as error:  # the caller's own; it is handed to the caller
            return TransactionResult(value=None, error=error, revision=self._revision, depends=depends)
        if changes:
            depends = True
            self._keep(changes, draft.now_ns, actor, action)
        return TransactionResult(value=value, error=None, revision=self._revision, depends=depends)

    def _keep(self, changes: DraftChanges, now_ns: int, actor: str, action: str) -> None:
        first = self._revision + 1
        if changes.takes_revision:
            self._revision = changes.resources[-1].event.revision if changes.resources else first
        for change in changes.resources:
            key, event = change.key, change.event
            resource = event.resource
            deleted = event.type is EventType.DELETED
            self._resources[key] = None if deleted else resource
            if event.type is not EventType.MODIFIED:
                self._counts.add(key, -1 if deleted else 1)
            self._bodies[key] = change.body
            self.events.append(event)
            self._size += len(change.body)
            self._rows.append(
                LogRow(
                    event.revision,
                    event.revision - first,
                    _TYPES[event.type],
                    key.kind,
                    key.scope,
                    encode(bare(resource)) if key.kind in self._unlogged else change.body,
                )
            )
        seq = self._before.audit_seq + len(self._audit) + 1
        if changes.claims:
            self._claims.update(changes.claims)
            self._rows += engine.of_claims(changes.claims, self._revision)
        if changes.secrets:
            self._keep_secrets(changes.secrets, seq)
        entry = audit.ChainEntry(
            seq=seq,
            revision=self._revision,
            at_ns=now_ns,
            actor=actor,
            action=action,
            changes=audited(changes),
        )
        last = self._audit[-1].hash if self._audit else self._before.audit_hash
        self._audit.append(audit.append(last, entry, self._audit_key))
        self.transactions += 1

    def _keep_secrets(self, secrets: Mapping[str, bytes | None], version: int) -> None:
        for name, blob in secrets.items():
            self._secrets[name] = None if blob is None else SecretRow(name, blob, version)
            self._size += len(blob or b"")
        self._rows += engine.of_secrets(secrets, self._revision, version)

    def cut(self, cut: ArchiveCut) -> None:
        """Let the audit chain begin after an entry that is archived."""
        self._cut = cut

    def compact(self, horizon: int) -> None:
        """Let the log begin after `horizon`."""
        self._compacted = max(self._compacted, min(horizon, self._revision))

    # What it comes to.

    @property
    def revision(self) -> int:
        return self._revision

    @property
    def is_full(self) -> bool:
        """Whether it should be written before any more transactions are run."""
        return len(self._rows) >= ROWS_LIMIT or self._size >= BYTES_LIMIT

    @property
    def changed(self) -> bool:
        return bool(self._audit) or self._compacted != self._before.compacted

    @property
    def before(self) -> DatabaseMark:
        return self._before

    def after(self) -> DatabaseMark:
        return DatabaseMark(
            number=self._before.number + 1,
            revision=self._revision,
            compacted=self._compacted,
            audit_seq=self._before.audit_seq + len(self._audit),
            audit_hash=self._audit[-1].hash if self._audit else self._before.audit_hash,
        )

    def rows(self) -> WriteGroup:
        """For the database: of each resource only the last state, of the log everything."""
        rows = WriteGroup(
            id=self.id,
            author=self.author,
            before=self._before,
            after=self.after(),
            log=self._rows,
            audit=self._audit,
            cut=self._cut,
        )
        if self._compacted != self._before.compacted:
            rows.log = [*self._rows, engine.of_horizon(self._compacted, self._revision)]
        for key, resource in self._resources.items():
            if resource is None:
                rows.deletes.append(key)
            else:
                rows.puts.append(ResourceRow(*key, resource.revision, self._bodies[key]))
        rows.kinds = list({event.resource.kind: event.revision for event in self.events}.items())
        for claim, owner in self._claims.items():
            if claim in self._view.claims:
                rows.releases.append(claim)
            if owner is not None:
                rows.claims.append(ClaimRow(*claim, owner))
        for name, secret in self._secrets.items():
            if secret is None:
                rows.secret_deletes.append((name,))
            else:
                rows.secrets.append(secret)
        return rows

    def apply(self) -> None:
        """Let memory show what is now durable."""
        for key, resource in self._resources.items():
            kind = self._view.of(key.kind)
            if resource is None:
                kind.delete(key.scope, key.name)
            else:
                kind.put(resource)
        for event in self.events:
            self._view.of(event.resource.kind).revision = event.revision
        for claim, owner in self._claims.items():
            if owner is None:
                self._view.claims.pop(claim, None)
            else:
                self._view.claims[claim] = owner


class Applier:
    def __init__(
        self,
        kinds: Mapping[str, AnyKind],
        view: StoreView,
        hub: Hub,
        mark: DatabaseMark,
        levels: level.Levels = level.SUPPORTED,
    ) -> None:
        self._kinds = kinds
        self._view = view
        self._hub = hub
        self._levels = levels
        self.mark = mark
        """Where memory stands."""
        self.secret_changed: Callable[[str], None] = _ignored
        """Told the name of each secret that another process has put or deleted."""
        self.wrote: Callable[[int], None] = _unheard
        """Told the number of each group that this process has written."""

    def __repr__(self) -> str:
        return f"<Applier number={self.mark.number} revision={self.mark.revision}>"

    def own(self, group: GroupState) -> None:
        """What this process wrote, unless it was read from the log before the database's answer came."""
        after = group.after()
        if after.number > self.mark.number:
            self._check(after)
            group.apply()
            self._show(group.events, after)
        self.wrote(after.number)

    def foreign(self, logged: LoggedGroup, bodies: Mapping[Key, AnyResource]) -> None:
        """What another process wrote; `bodies` has what the log leaves out (`Kind.is_logged`)."""
        self._check(logged.mark)
        events: list[Event] = []
        for row in logged.log:
            if not row.kind:
                self._other(row)
            elif (event := self._change(row, bodies)) is not None:
                events.append(event)
        self._show(events, logged.mark)

    def pass_over(self, mark: DatabaseMark) -> None:
        """A group that changed nothing, such as one that says who has the seat from now on."""
        if mark.number <= self.mark.number:
            return
        self._check(mark)
        self._show([], mark)

    def _check(self, mark: DatabaseMark) -> None:
        if mark.number != self.mark.number + 1:
            raise IntegrityError(f"group {mark.number} cannot be applied after group {self.mark.number}")

    def _show(self, events: list[Event], mark: DatabaseMark) -> None:
        self.mark = mark
        self._hub.compacted = mark.compacted
        self._hub.publish(events, mark.revision)

    def _change(self, row: LogRow, bodies: Mapping[Key, AnyResource]) -> Event | None:
        kind = self._kinds.get(row.kind)
        if kind is None:  # of a newer version: it stays in the database
            return None
        resource, view = kind.decode_logged(row.body), self._view.of(row.kind)
        if kind is level.LEVEL:  # before anything that was written from it on
            level.check(level.of(resource), self._levels)
            log.info("store.level_rose", to=level.of(resource))
        view.revision = row.revision
        if row.type == EventType.DELETED:
            known = (resource.scope, resource.name) in view.live
            view.delete(resource.scope, resource.name)
            if not known:  # of a kind whose content is not logged, and was gone before we could read it
                return None
        else:
            if not kind.is_logged:
                found = bodies.get(resource.key)
                if found is None or found.revision != row.revision:  # gone again, as a later group says
                    return None
                resource = found
            view.put(resource)
        return Event(type=EventType(row.type), resource=resource, revision=row.revision)

    def _other(self, row: LogRow) -> None:
        said = engine.read(row)
        if isinstance(said, Claimed):
            if row.type == LogType.CLAIMED:
                self._view.claims[said.claim] = said.owner
            else:
                self._view.claims.pop(said.claim, None)
        elif isinstance(said, SecretChanged):
            self.secret_changed(said.name)


def _ignored(_name: str) -> None:
    pass


def _unheard(_number: int) -> None:
    pass
