"""The store: transactions in, memory and watches out.

Decides nothing itself; it is where the writer, the memory view and the watch hub meet, and the
one face that the rest of Fleetplane sees of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import structlog

from fleetplane.kernel import boundary
from fleetplane.kernel.access import covers
from fleetplane.kernel.audit.chain import ACTION_LIMIT_BYTES, ACTOR_LIMIT_BYTES, Head, Row
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    Compacted,
    FleetplaneError,
    IntegrityError,
    InvalidArgument,
    SettingsError,
    Unavailable,
)
from fleetplane.kernel.resources import (
    AnyKind,
    AnyResource,
    Key,
    Kind,
    Resource,
    SpecT,
    StatusT,
    check_text,
)
from fleetplane.kernel.sealing import Sealer
from fleetplane.kernel.store import lineage
from fleetplane.kernel.store.commit_hooks import CommitHook, HookedChange, together
from fleetplane.kernel.store.disk import exclusive
from fleetplane.kernel.store.draft import Committed, Draft
from fleetplane.kernel.store.engine import ALONE, ArchiveCut, Claim, Engine, GroupAuthor, LogRow
from fleetplane.kernel.store.group import Applier
from fleetplane.kernel.store.lineage import adopt
from fleetplane.kernel.store.servers import leader_lease, level
from fleetplane.kernel.store.servers.level import Levels
from fleetplane.kernel.store.settings import StoreSettings, StoreStatistics
from fleetplane.kernel.store.transaction import Transaction
from fleetplane.kernel.store.view import Index, StoreView
from fleetplane.kernel.store.writer import TRIM_ROWS, StoreWriter
from fleetplane.kernel.watch import Event, EventPage, EventType, Hub, Watch

if TYPE_CHECKING:
    from fleetplane.kernel.store.notifiers.notifier import CommitNotifier
    from fleetplane.kernel.store.servers.engine import SharedEngine
    from fleetplane.kernel.store.servers.replica import Meanwhile

R = TypeVar("R")
log = structlog.get_logger(__name__)

Work = Callable[[], Coroutine[Any, Any, None]]
AuditKey = Callable[[bool], bytes]
"""The key of the audit chain, asked for once the database is known to be whole. Told whether nothing was
ever written to it: only then may a key be made."""
REACH_SECONDS = 5.0
"""How long a cursor from the future is waited for: as long as a server goes on without its database."""
REACH_LOOK_SECONDS = 0.05
SEAL_BATCH = 100
"""Resources of a transaction that seals what an earlier release stored in clear."""
FRESH_RETRY_SECONDS = 0.5
"""Before secrets that could not be read are tried again."""
SIGNATURES_KEPT = 1024
"""Pairs of actor and action that were checked; most writes come from few. At most 1.3 KB each."""
_WRITING_HERE: ContextVar[bool] = ContextVar("writing_here", default=False)
SYSTEM = "system"
"""The actor of what the server does for itself."""


class SecretCache(Protocol):
    """Holds in memory what secrets say."""

    def secret_changed(self, name: str) -> None:
        """Another process has put or deleted a secret of this name."""
        ...

    async def refresh(self) -> None:
        """Read again what has changed."""
        ...


class Store:
    """See `open`; the constructor takes what has been opened."""

    def __init__(
        self, engine: Engine, kinds: dict[str, AnyKind], view: StoreView, settings: StoreSettings
    ) -> None:
        self._engine = engine
        self._kinds = kinds
        self._view = view
        self._settings = settings
        self._hub: Hub
        self._applier: Applier
        self._writer: StoreWriter
        self._audit_key = b""
        self._writing: asyncio.Task[None]
        self._hooks: dict[str, tuple[CommitHook, ...]] = {}
        """By kind; those of every write under the empty string."""
        self._caches: list[SecretCache] = []
        self._secret_changed = asyncio.Event()
        self.lineage = ""
        """Of the database; the revisions of another one mean nothing here."""
        self.exclusive = False
        """Whether this process alone does what one does for all: others that write run no controllers."""
        self.shared = False
        """Whether other servers write to the same database, and may know what this one does not yet."""
        self.succeeds = False
        """Whether this server became active by following another one: somebody listened all the time."""
        self.bell: CommitNotifier | None = None
        """What tells them of writes, and this one of theirs."""
        self.elsewhere: Callable[[], FleetplaneError] | None = None
        """On a server that stands by: the refusal of what only the active one does."""
        self._confirm: Callable[[], Awaitable[None]] = _nothing_to_wait_for

    def __repr__(self) -> str:
        return f"<Store revision={self.revision} resources={len(self._view)}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: StoreSettings,
        *,
        kinds: Iterable[AnyKind],
        clock: Clock,
        audit_key: AuditKey | None = None,
        meanwhile: Meanwhile | None = None,
    ) -> AsyncIterator[Store]:
        """Open the database, alone, and load it; on leaving, write what was accepted and close it.

        With an address (`settings.url`), wait until this is the one of several servers that writes;
        `meanwhile` runs while it waits.
        Refuses one that is missing, older than its mark or not the one that was here.
        """
        path = settings.path
        with exclusive(path.with_name(path.name + ".lock")):
            if settings.url:
                from fleetplane.kernel.store.servers.replica import opened

                async with opened(
                    settings, kinds=kinds, clock=clock, audit_key=audit_key, meanwhile=meanwhile
                ) as store:
                    yield store
                return
            from fleetplane.kernel.store.engines.sqlite import SqliteEngine

            lineage.check_present(path, settings.evidence)
            engine = await SqliteEngine.open(settings)
            try:
                beside = lineage.MarkFile(path)
                is_new = await lineage.check_whole(engine, path, beside.read())
                key = audit_key(is_new) if audit_key is not None else b""
                async with (
                    lineage.kept(beside) as keeper,
                    cls.on(engine, settings, kinds=kinds, clock=clock, audit_key=key) as store,
                ):
                    store.exclusive = True
                    keeper.follow(store._recorded)
                    await store.rise(settings.levels.highest)  # nobody else uses the file
                    sealed = await store.seal_stored()
                    await store.forget_unsealed(store.revision)
                    if store.seals and (sealed or not await engine.is_scrubbed()):
                        while await engine.trim(TRIM_ROWS) >= TRIM_ROWS:
                            pass
                        await engine.scrub()
                    yield store
            finally:
                await engine.close()

    @classmethod
    @asynccontextmanager
    async def on(
        cls,
        engine: Engine,
        settings: StoreSettings,
        *,
        kinds: Iterable[AnyKind],
        clock: Clock,
        audit_key: bytes = b"",
    ) -> AsyncIterator[Store]:
        """A store on an engine that someone else opens and closes, and that no other process writes to."""
        store = await cls.loaded(engine, settings, kinds=kinds, clock=clock, audit_key=audit_key)
        async with store.written(ALONE), store.led():
            yield store

    @classmethod
    async def loaded(
        cls,
        engine: Engine,
        settings: StoreSettings,
        *,
        kinds: Iterable[AnyKind],
        clock: Clock,
        audit_key: bytes = b"",
    ) -> Store:
        """A store that can be read and watched, and written to once it is known as whom."""
        sealer = Sealer(audit_key, clock) if audit_key else None
        by_name = _by_name([*kinds, level.LEVEL], sealer)
        unlogged = [name for name, kind in by_name.items() if not kind.is_logged]
        loaded: dict[str, list[AnyResource]] = {name: [] for name in by_name}
        broken: IntegrityError | None = None
        async with engine.load(list(by_name)) as contents:
            sealers = {name: kind.sealer for name, kind in by_name.items() if kind.sealer is not None}
            view = StoreView(by_name, contents.kinds, unlogged, contents.first_revision, sealers)
            view.claims.update((Claim(*row[:4]), row.owner) for row in contents.claims)
            async for page in contents.resources:
                for row in page:
                    try:
                        loaded[row.kind].append(by_name[row.kind].decode(row.body))
                    except IntegrityError as error:  # perhaps of a newer program, which the level tells
                        broken = broken or error
        for name, resources in loaded.items():
            view.of(name).load(resources)
        mark = contents.mark
        if mark.number:  # of a new one the level is yet to be written
            level.check(level.of(view.get(level.KEY)), settings.levels)
        if broken is not None:
            raise broken
        store = cls(engine, by_name, view, settings)
        store.lineage = contents.lineage
        store._hub = Hub(store, settings.watch_limits, revision=mark.revision, compacted=mark.compacted)
        store._applier = Applier(by_name, view, store._hub, mark, settings.levels)
        store._writer = StoreWriter(engine, view, store._applier, settings, clock, audit_key)
        store._audit_key = audit_key
        return store

    def reader(self, elsewhere: Callable[[], FleetplaneError] | None = None) -> Store:
        """The same store for whoever reads: it shares memory and watches, and refuses writes, but for those
        inside `writing_here`.

        What accompanies transactions of the one is not there for those of the other.
        """
        other = Store(self._engine, self._kinds, self._view, self._settings)
        other.lineage, other._audit_key, other.shared = self.lineage, self._audit_key, self.shared
        other._hub, other._applier, other._writer = self._hub, self._applier, self._writer
        other.bell, other._confirm = self.bell, self._confirm
        other.elsewhere = elsewhere or _stands_by
        other._hear_of_secrets()
        return other

    def lead(self, led: Store) -> None:
        """Be the active server's store from now on, having been a reader of `led`: nothing is refused."""
        self.exclusive, self.succeeds = led.exclusive, led.succeeds
        self.elsewhere = None

    def _hear_of_secrets(self) -> None:
        self._applier.secret_changed = self._note_secret

    def _note_secret(self, name: str) -> None:
        for cache in self._caches:
            cache.secret_changed(name)
        self._secret_changed.set()

    async def keeping_fresh(self) -> None:
        """Let every cache read at once what other servers change, until cancelled.

        Whoever is let in before every call asks by itself; watches that go on look at what is in memory.
        """
        while True:
            await self._secret_changed.wait()
            self._secret_changed.clear()
            try:
                await self.refreshed()
            except FleetplaneError as error:  # the database is away; what is stale stays so
                log.warning("store.secrets_not_read", error=error.message)
                self._secret_changed.set()
                await self.clock.sleep(FRESH_RETRY_SECONDS)

    def keep_fresh(self, cache: SecretCache) -> None:
        """Tell from now on about secrets that another process has changed."""
        self._caches.append(cache)

    async def refreshed(self) -> None:
        """Return once every cache has what the secrets are now, as far as the store has come."""
        for cache in self._caches:
            await cache.refresh()

    @asynccontextmanager
    async def written(
        self, author: GroupAuthor, *besides: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Let this process write, for as long as what runs besides does not raise."""
        self._hear_of_secrets()
        writer = self._writer
        writer.author = author
        self._writing = task = asyncio.create_task(first(writer.run, *besides), name="store-writer")
        try:
            yield
        finally:
            writer.close()
            try:
                await task
            finally:
                self._hub.close()

    @asynccontextmanager
    async def led(self) -> AsyncIterator[None]:
        """Let this process do what one does for all: it checks the key of the chain, and trims the log."""
        trimming = asyncio.create_task(boundary.kept("store/trim", self._writer.trim))
        try:
            if self._audit_key:
                await adopt(self._engine, self, self._audit_key)
            yield
        finally:
            trimming.cancel()
            await asyncio.gather(trimming, return_exceptions=True)

    def _recorded(self) -> lineage.Recorded:
        mark = self._writer.mark
        return lineage.Recorded(
            lineage=self.lineage,
            revision=mark.revision,
            audit_seq=mark.audit_seq,
            audit_hash=mark.audit_hash.hex(),
        )

    # Reading.

    @property
    def revision(self) -> int:
        """The last durable revision; what readers and watchers see."""
        return self._hub.revision

    @property
    def level(self) -> int:
        """What may be written. Who decides by it does so inside a transaction: see `Draft.level`."""
        return level.of(self._view.get(level.KEY))

    @property
    def levels(self) -> Levels:
        """That this program supports."""
        return self._settings.levels

    @property
    def level_delay_seconds(self) -> float:
        return self._settings.level_delay_seconds

    async def rise(self, to: int) -> None:
        """Raise the level: from the next group on, everybody may write what it brings."""

        def change(draft: Draft) -> bool:
            found = draft.get(level.LEVEL, "", level.NAME)
            since = level.sealed_since(found)
            if not since and self._view.sealers and to >= level.SEALED:
                since = draft.revision
            spec = level.LevelSpec(max(to, level.of(found)), since)
            if spec == (level.LevelSpec(level.FIRST) if found is None else found.spec):
                return False
            draft.put(level.LEVEL, "", level.NAME, spec=spec)
            return True

        if to <= self.level and (self.seals or not self._view.sealers):
            return
        if self.levels == level.SUPPORTED and not self._view.sealers:
            return  # all that this release's level brings is sealing, and there is nothing to seal
        if (await self.transact(change, actor=SYSTEM, action="store.rise", touches=[level.KEY])).value:
            log.info("store.level_rose", to=to)

    @property
    def seals(self) -> bool:
        """Whether secret kinds are stored sealed."""
        return self._sealed_since > 0

    @property
    def _sealed_since(self) -> int:
        return level.sealed_since(self._view.get(level.KEY))

    async def seal_stored(self) -> int:
        """Seal what was written before secret kinds were; returns how many resources.

        Each is written once more, as it is, so that it can be broken off and begun again.
        """
        since = self._sealed_since
        found = [
            one.key
            for name in (self._view.sealers if since else ())
            for one in self._view.of(name).list("")
            if one.revision < since
        ]
        for start in range(0, len(found), SEAL_BATCH):
            keys = found[start : start + SEAL_BATCH]

            def change(draft: Draft, keys: Sequence[Key] = keys) -> None:
                for key in keys:
                    draft.rewrite(key)

            await self.transact(change, actor=SYSTEM, action="store.seal", touches=keys)
        if found:
            log.info("store.sealed", resources=len(found))
        return len(found)

    async def forget_unsealed(self, until: int) -> None:
        """Compact up to a revision at which all was sealed, unless that was done: the log had it in clear."""
        if self._hub.compacted < self._sealed_since - 1:
            await self.compact(until + 1)

    def get(self, kind: Kind[SpecT, StatusT], scope: str, name: str) -> Resource[SpecT, StatusT] | None:
        return self._view.of(kind.name).live.get((scope, name))

    def peeker(
        self, kind: Kind[SpecT, StatusT], scope: str
    ) -> Callable[[str], Resource[SpecT, StatusT] | None]:
        """A function that gives what is there, unless a write that touches it is not settled yet.

        For readers that ask very often: everything that does not depend on the name is looked up
        once.
        """
        live, unsettled = self._view.of(kind.name).live, self._writer.unsettled_kinds

        def peek(name: str) -> Resource[SpecT, StatusT] | None:
            if kind.name in unsettled and self.pending(Key(kind.name, scope, name)):
                return None
            return live.get((scope, name))

        return peek

    def list(self, kind: Kind[SpecT, StatusT], scope: str = "") -> Sequence[Resource[SpecT, StatusT]]:
        """Everything at or below a scope, by scope and name. The same object until something changes."""
        return self._view.of(kind.name).list(scope)

    def count(self, kind: AnyKind, scope: str = "") -> int:
        """How many there are at or below a scope; costs the same however many there are."""
        return self._view.of(kind.name).count(scope)

    def snapshot(
        self, kind: Kind[SpecT, StatusT], scope: str = ""
    ) -> tuple[int, Sequence[Resource[SpecT, StatusT]]]:
        """A list and the revision it is of; a watch after that revision continues it."""
        return self.revision, self.list(kind, scope)

    def kind_revision(self, kind: AnyKind) -> int:
        """The revision of the last change to this kind; the lineage's first revision if there was none."""
        return self._view.of(kind.name).revision

    def feed(self, kind: AnyKind, index: Index) -> None:
        """Keep an index of one kind in step with what can be read; it is held weakly."""
        self._view.of(kind.name).feed(index)

    def claimed_by(self, kind: AnyKind, scope: str, field: str, value: str) -> str | None:
        return self._view.claims.get(Claim(kind.name, scope, field, value))

    def claims(self, kind: AnyKind, scope: str = "") -> Sequence[tuple[Claim, str]]:
        """All claims of a kind at or below a scope, each with its owner; looks at every claim there is."""
        name = kind.name
        return [
            (claim, owner)
            for claim, owner in self._view.claims.items()
            if claim.kind == name and covers(scope, claim.scope)
        ]

    @property
    def clock(self) -> Clock:
        """By which transactions are dated: the database's, where several servers share it."""
        return self._writer.clock

    @property
    def author(self) -> GroupAuthor:
        """As whom this process writes: where several servers share the database, its name and boot."""
        return self._writer.author or ALONE

    @property
    def leads(self) -> bool:
        """Whether this server does what one does for all; False on one that stands by."""
        return self.elsewhere is None

    @property
    def shared_engine(self) -> SharedEngine | None:
        """What is kept beside the log where several servers share the database; None on a file."""
        return cast("SharedEngine", self._engine) if self.shared else None

    async def living(self) -> Mapping[str, int]:
        """Servers that may write now, each with its boot; none where this process is the only one.

        Raises `Unavailable` if the database cannot be asked.
        """
        engine = self.shared_engine
        return await engine.living(leader_lease.LIFE_SECONDS) if engine is not None else {}

    async def confirmed(self) -> None:
        """Return once memory has everything that was acknowledged before, by whichever server.

        Raises `Unavailable` if that cannot be known now.
        """
        await self._confirm()

    async def reached(self, revision: int) -> bool:
        """Wait for a revision that somebody knows from another server; False if it does not come.

        Even the server that writes may be behind those that follow it: while it does not know whether its
        own commit was done, they may have read it.
        """
        waited = 0.0
        while revision > self.revision:
            if not self.shared or self._hub.closed or waited >= REACH_SECONDS:
                return False
            waited += REACH_LOOK_SECONDS
            await self._writer.clock.sleep(REACH_LOOK_SECONDS)
        return True

    # Reading what is being written.

    def pending(self, what: Key | AnyKind) -> bool:
        """Whether a write that touches this resource, or this kind, is accepted and not yet settled."""
        return bool(self._writer.last_for(what.name if isinstance(what, Kind) else what))

    def unsettled(
        self, kind: AnyKind, scope: str | None = None, name: str | None = None
    ) -> asyncio.Future[None] | None:
        """None if nothing is being written there; else what to await before reading.

        The future is the caller's own. It is done once every write accepted before this call
        is applied or has failed; later writes do not extend the wait.
        """
        what = kind.name if scope is None or name is None else Key(kind.name, scope, name)
        submissions = self._writer.last_for(what)
        return self._writer.settlement(submissions) if submissions else None

    async def settled(self, kind: AnyKind, scope: str | None = None, name: str | None = None) -> None:
        if (waiter := self.unsettled(kind, scope, name)) is not None:
            await waiter

    # Writing.

    async def writing(self) -> None:
        """Wait until nothing can be written any more: raises what ended it, or returns at the close.

        For whoever runs the store to await: a server that goes on without its writer looks alive.
        """
        await asyncio.shield(self._writing)

    async def transact(
        self, change: Callable[[Draft], R], *, actor: str, action: str, touches: Iterable[Key]
    ) -> Committed[R]:
        """Run `change` in the writer; answer once what it did and saw is durable.

        In order of arrival; while many wait, each tenant in its turn (see `queue.py`).

        `change` must be pure: it may be run late, several times on different states or, if its caller goes
        away first, never.
        `touches` names every resource that it might change.
        """
        self._check_may_write()
        _check_signature(actor, action)
        keys = frozenset(touches)
        asked = [hook(actor, action, keys) for hook in self._hooks_of(keys)]
        if parts := [part for part in asked if part is not None]:
            keys = keys.union(*(part.touches for part in parts))
            both = self._writer.submit(together(change, parts), actor=actor, action=action, touches=keys)
            return _without_parts(cast("Committed[tuple[R, Any]]", await both), parts)
        answer = self._writer.submit(change, actor=actor, action=action, touches=keys)
        return cast("Committed[R]", await answer)

    def _check_may_write(self) -> None:
        if self.elsewhere is not None and not _WRITING_HERE.get():
            raise self.elsewhere()

    @contextmanager
    def writing_here(self) -> Iterator[None]:
        """Let what runs inside write on a server that stands by: it does nothing that only one may do."""
        before = _WRITING_HERE.set(True)
        try:
            yield
        finally:
            _WRITING_HERE.reset(before)

    def add_hook(self, hook: CommitHook, *kinds: AnyKind) -> None:
        """Let a commit hook add to transactions that touch one of these kinds, or to all if none is given."""
        for name in [kind.name for kind in kinds] or [""]:
            self._hooks[name] = (*self._hooks.get(name, ()), hook)

    def _hooks_of(self, keys: frozenset[Key]) -> Collection[CommitHook]:
        """Each once: those of every write, then those of the kinds touched, by name."""
        names = sorted({"", *(key.kind for key in keys)} & self._hooks.keys())
        return dict.fromkeys(hook for name in names for hook in self._hooks[name])

    async def apply(self, transaction: Transaction) -> Committed[None]:
        return await self.transact(
            transaction.change,
            actor=transaction.actor,
            action=transaction.action,
            touches=transaction.touches,
        )

    async def compact(self, before: int) -> None:
        """Forget the history of revisions before this one. What is live stays."""
        self._check_may_write()
        if before > self.revision + 1:
            raise InvalidArgument(f"revision {before} is in the future; the newest is {self.revision}")
        await self._writer.submit(
            lambda _: None, actor=SYSTEM, action="store.compact", touches=frozenset(), horizon=before - 1
        )

    # Watching.

    def watch(self, kind: AnyKind, scope: str = "", *, after: int | None = None) -> Watch:
        """Changes after a revision, or from now on; raises `Compacted` if they are no longer kept."""
        self._view.of(kind.name)
        return self._hub.open(kind.name, scope, after)

    def changed_since(self, kind: str, scope: str, revision: int) -> Iterable[AnyResource]:
        return self._view.changed_since(kind, scope, revision)

    async def history(self, kind: str, scope: str, *, after: int, until: int) -> EventPage:
        """A page of logged events, for a watch that resumes."""
        page = await self._engine.history(
            kind, after=after, until=until, limit=self._settings.replay_page_events
        )
        if page.compacted > after:
            raise Compacted(f"revision {after} is no longer kept; history begins after {page.compacted}")
        events = [
            Event(type=EventType(row.type), resource=self._logged(row), revision=row.revision)
            for row in page.events
            if covers(scope, row.scope)
        ]
        if not self._kinds[kind].is_logged:
            events = [event for event in events if _is_worth_telling(event, after)]
        return EventPage(revision=until if page.complete else page.events[-1].revision, events=events)

    def _logged(self, row: LogRow) -> AnyResource:
        found = self._kinds[row.kind].decode_logged(row.body)
        if found.spec is None and row.type != EventType.DELETED:
            live = self._view.get(found.key)
            if live is not None and live.revision == row.revision:
                return live
        return found

    async def history_bytes(self) -> int:
        """What the log weighs."""
        return await self._engine.history_bytes()

    async def history_horizon(self, size_bytes: int) -> int:
        """The revision up to which the log weighs at least so much."""
        return await self._engine.history_horizon(size_bytes)

    async def audit_row(self, seq: int) -> Row | None:
        return await self._engine.audit_row(seq)

    # Secrets: opaque, durable, audited by name; no resources.

    async def put_secret(self, name: str, blob: bytes, *, actor: str = SYSTEM) -> None:
        """Keep a blob, which the caller has encrypted."""
        await self.transact(
            lambda draft: draft.put_secret(name, blob), actor=actor, action="secret.put", touches=()
        )

    async def get_secret(self, name: str) -> bytes | None:
        return await self._engine.secret(name)

    async def secret_names(self, prefix: str = "") -> Sequence[str]:
        return await self._engine.secret_names(prefix)

    async def delete_secret(self, name: str, *, actor: str = SYSTEM) -> None:
        await self.transact(
            lambda draft: draft.delete_secret(name), actor=actor, action="secret.delete", touches=()
        )

    # Looking inside.

    async def audit(self, *, after: int = 0) -> AsyncGenerator[Row, None]:
        """The audit chain, after an entry's number."""
        async with aclosing(self._engine.audit(after=after)) as pages:
            async for page in pages:
                for row in page:
                    yield row

    async def cut_audit(self, seq: int, checkpoint: str, change: Callable[[Draft], object]) -> None:
        """Forget the audit entries up to one that is archived; `change` says so in the log."""
        self._check_may_write()
        if seq >= self.audit_head().seq:
            raise InvalidArgument(f"entry {seq} is not older than the log's last")
        await self._writer.submit(
            change,
            actor=SYSTEM,
            action="audit.archive",
            touches=frozenset(),
            cut=ArchiveCut(seq=seq, checkpoint=checkpoint),
        )

    def audit_head(self) -> Head:
        mark = self._writer.mark
        return Head(revision=mark.revision, seq=mark.audit_seq, hash=mark.audit_hash)

    def statistics(self) -> StoreStatistics:
        hub, writer = self._hub, self._writer
        return StoreStatistics(
            revision=self.revision,
            compacted=hub.compacted,
            level=self.level,
            supported_level=self._settings.levels.highest,
            resources=len(self._view),
            claims=len(self._view.claims),
            queued=writer.queued,
            queue_refusals=writer.queue_refusals,
            commits=writer.commits,
            transactions=writer.transactions,
            largest_group=writer.largest_group,
            failed_commits=writer.failed_commits,
            writable=writer.writable,
            ring_events=hub.ring_length,
            tombstones=hub.tombstone_count,
            watchers=hub.watchers,
            coalesced_events=hub.coalesced,
            refills=hub.refilled,
        )


@lru_cache(maxsize=SIGNATURES_KEPT)
def _check_signature(actor: str, action: str) -> None:
    """Refuse names that the audit log could not keep."""
    check_text("actor", actor, ACTOR_LIMIT_BYTES)
    check_text("action", action, ACTION_LIMIT_BYTES)


def _without_parts(committed: Committed[tuple[R, Any]], parts: Sequence[HookedChange]) -> Committed[R]:
    """The answer of a change that had commit hooks; each hook is told the result of its own change."""
    value, theirs = committed.value
    for part, one in zip(parts, theirs, strict=True):
        if part.kept is not None:
            part.kept(one)
    return Committed(value=value, revision=committed.revision)


def _stands_by() -> FleetplaneError:
    return Unavailable("this server stands by: another one is active", hint="call the active server")


async def _nothing_to_wait_for() -> None:
    """Nobody else writes: memory is always up to date."""


async def first(*works: Work) -> None:
    """Run several until one of them ends, or raises; the others are cancelled then."""
    tasks = [asyncio.create_task(work()) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _is_worth_telling(event: Event, after: int) -> bool:
    """Whether to show an event of a kind without logged content: unchanged, or a known deletion."""
    if event.type is EventType.DELETED:
        return event.resource.created_revision <= after
    return event.resource.spec is not None


def _by_name(kinds: Iterable[AnyKind], sealer: Sealer | None) -> dict[str, AnyKind]:
    by_name: dict[str, AnyKind] = {}
    for kind in kinds:
        if by_name.setdefault(kind.name, kind) is not kind:
            raise SettingsError(f"two kinds are called {kind.name}")
    if sealer is None:
        return by_name
    return {name: replace(kind, sealer=sealer) if kind.is_secret else kind for name, kind in by_name.items()}
