"""The store: transactions in, memory and watches out.

Decides nothing itself; it is where the writer, the memory view and the watch hub meet, and the
one face that the rest of Fleetplane sees of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast

from fleetplane.kernel.access import covers
from fleetplane.kernel.audit import ACTION_LIMIT_BYTES, ACTOR_LIMIT_BYTES, Head, Row
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import Compacted, InvalidArgument, SettingsError
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
from fleetplane.kernel.store.companions import Companion, together
from fleetplane.kernel.store.draft import Committed, Draft
from fleetplane.kernel.store.engine import Claim, Engine
from fleetplane.kernel.store.lock import exclusive
from fleetplane.kernel.store.settings import StoreSettings, StoreStatistics
from fleetplane.kernel.store.transaction import Transaction
from fleetplane.kernel.store.view import View
from fleetplane.kernel.store.writer import Writer
from fleetplane.kernel.watch import Event, EventType, Hub, Page, Watch

R = TypeVar("R")

SYSTEM = "system"
"""The actor of what the server does for itself."""


class Store:
    """See `open`; the constructor takes what has been opened."""

    def __init__(
        self, engine: Engine, kinds: dict[str, AnyKind], view: View, settings: StoreSettings
    ) -> None:
        self._engine = engine
        self._kinds = kinds
        self._view = view
        self._settings = settings
        self._hub: Hub
        self._writer: Writer
        self._writing: asyncio.Task[None]
        self._companions: tuple[Companion, ...] = ()
        self.exclusive = False
        """Whether no other process can have the same database open."""

    def __repr__(self) -> str:
        return f"<Store revision={self.revision} resources={len(self._view)}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: StoreSettings, *, kinds: Iterable[AnyKind], clock: Clock
    ) -> AsyncIterator[Store]:
        """Open the database, alone, and load it; on leaving, write what was accepted and close it."""
        with exclusive(settings.path.with_name(settings.path.name + ".lock")):
            from fleetplane.kernel.store.sqlite import SqliteEngine

            engine = await SqliteEngine.open(settings)
            try:
                async with cls.on(engine, settings, kinds=kinds, clock=clock) as store:
                    store.exclusive = True
                    yield store
            finally:
                await engine.close()

    @classmethod
    @asynccontextmanager
    async def on(
        cls, engine: Engine, settings: StoreSettings, *, kinds: Iterable[AnyKind], clock: Clock
    ) -> AsyncIterator[Store]:
        """A store on an engine that someone else opens and closes."""
        by_name = _by_name(kinds)
        contents = await engine.contents()
        view = View(by_name, contents.kinds)
        view.claims.update((Claim(*row[:4]), row.owner) for row in contents.claims)
        loaded: dict[str, list[AnyResource]] = {name: [] for name in by_name}
        async for page in engine.resources(list(by_name)):
            for row in page:
                loaded[row.kind].append(by_name[row.kind].decode(row.body))
        for name, resources in loaded.items():
            view.of(name).load(resources)
        mark = contents.mark
        store = cls(engine, by_name, view, settings)
        store._hub = Hub(store, settings.watch_limits, revision=mark.revision, compacted=mark.compacted)
        store._writer = writer = Writer(engine, view, store._hub, mark, settings, clock)
        store._writing = task = asyncio.create_task(writer.run(), name="store-writer")
        try:
            yield store
        finally:
            writer.close()
            try:
                await task
            finally:
                store._hub.close()

    # Reading.

    @property
    def revision(self) -> int:
        """The last durable revision; what readers and watchers see."""
        return self._hub.revision

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

    def snapshot(
        self, kind: Kind[SpecT, StatusT], scope: str = ""
    ) -> tuple[int, Sequence[Resource[SpecT, StatusT]]]:
        """A list and the revision it is of; a watch after that revision continues it."""
        return self.revision, self.list(kind, scope)

    def kind_revision(self, kind: AnyKind) -> int:
        """Of the last change to anything of this kind; 0 if there was none."""
        return self._view.of(kind.name).revision

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

    # Reading what is being written.

    def pending(self, what: Key | AnyKind) -> bool:
        """Whether a write that touches this resource, or this kind, is accepted and not yet settled."""
        return self._writer.last_for(what.name if isinstance(what, Kind) else what) is not None

    def unsettled(
        self, kind: AnyKind, scope: str | None = None, name: str | None = None
    ) -> asyncio.Future[None] | None:
        """None if nothing is being written there; else what to await before reading.

        The future is the caller's own. It is done once every write accepted before this call
        is applied or has failed; later writes do not extend the wait.
        """
        what = kind.name if scope is None or name is None else Key(kind.name, scope, name)
        submission = self._writer.last_for(what)
        return None if submission is None else self._writer.settlement(submission)

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
        """Run `change` in the writer, in order of arrival; answer once what it did and saw is durable.

        `change` must be pure: it may be run late or, if its caller goes away first, never.
        `touches` names every resource that it might change.
        """
        check_text("actor", actor, ACTOR_LIMIT_BYTES)
        check_text("action", action, ACTION_LIMIT_BYTES)
        keys = frozenset(touches)
        if self._companions:
            asked = (companion(actor, action, keys) for companion in self._companions)
            if parts := [part for part in asked if part is not None]:
                change = together(change, parts)
                keys = keys.union(*(part.touches for part in parts))
        answer = self._writer.submit(change, actor=actor, action=action, touches=keys)
        return cast("Committed[R]", await answer)

    def accompany(self, companion: Companion) -> None:
        """From now on, let it add to transactions what must be durable with them or not at all."""
        self._companions += (companion,)

    async def apply(self, transaction: Transaction) -> Committed[None]:
        return await self.transact(
            transaction.change,
            actor=transaction.actor,
            action=transaction.action,
            touches=transaction.touches,
        )

    async def compact(self, before: int) -> None:
        """Forget the history of revisions before this one. What is live stays."""
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

    async def history(self, kind: str, scope: str, *, after: int, until: int) -> Page:
        """A page of logged events, for a watch that resumes."""
        page = await self._engine.history(
            kind, after=after, until=until, limit=self._settings.replay_page_events
        )
        if page.compacted > after:
            raise Compacted(f"revision {after} is no longer kept; history begins after {page.compacted}")
        decode = self._kinds[kind].decode
        return Page(
            revision=until if page.complete else page.events[-1].revision,
            events=[
                Event(type=EventType(row.type), resource=decode(row.body), revision=row.revision)
                for row in page.events
                if covers(scope, row.scope)
            ],
        )

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

    async def audit(self, *, after: int = 0) -> AsyncIterator[Row]:
        """The audit chain, after an entry's number."""
        async for page in self._engine.audit(after=after):
            for row in page:
                yield row

    def audit_head(self) -> Head:
        mark = self._writer.mark
        return Head(revision=mark.revision, seq=mark.audit_seq, hash=mark.audit_hash)

    def statistics(self) -> StoreStatistics:
        hub, writer = self._hub, self._writer
        return StoreStatistics(
            revision=self.revision,
            compacted=hub.compacted,
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


def _by_name(kinds: Iterable[AnyKind]) -> dict[str, AnyKind]:
    by_name: dict[str, AnyKind] = {}
    for kind in kinds:
        if by_name.setdefault(kind.name, kind) is not kind:
            raise SettingsError(f"two kinds are called {kind.name}")
    return by_name
