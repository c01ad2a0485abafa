"""What the store's tests share: two small kinds, short verbs, and an engine that fails on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.resources import AnyKind, Kind, Resource
from fleetplane.kernel.store import Committed, Draft, Store, StoreSettings
from fleetplane.kernel.store.engine import (
    DatabaseMark,
    Engine,
    GroupAuthor,
    GroupOutcome,
    GroupPage,
    HistoryPage,
    StoreContents,
    WriteGroup,
)
from fleetplane.kernel.store.engines.sqlite import SqliteEngine
from fleetplane.kernel.watch import Event, EventBatch, Watch

DEADLINE_SECONDS = 60.0


class Spec(msgspec.Struct, frozen=True):
    value: int = 0
    padding: str = ""


class Status(msgspec.Struct, frozen=True):
    ready: bool = False


THING: Kind[Spec, Status] = Kind("thing", Spec, Status)
OTHER: Kind[Spec, Status] = Kind("other", Spec, Status)
KINDS: Sequence[AnyKind] = (THING, OTHER)
SCOPE = "org/a"


def opened(path: Path, **settings: Any) -> AbstractAsyncContextManager[Store]:
    return Store.open(StoreSettings(path=path, **settings), kinds=KINDS, clock=SystemClock())


async def put(
    store: Store,
    name: str,
    value: int = 0,
    *,
    scope: str = SCOPE,
    kind: Kind[Spec, Status] = THING,
    padding: str = "",
) -> Committed[Resource[Spec, Status]]:
    return await store.transact(
        lambda draft: draft.put(kind, scope, name, spec=Spec(value=value, padding=padding)),
        actor="tester",
        action="put",
        touches=[kind.key(scope, name)],
    )


async def remove(
    store: Store, name: str, *, scope: str = SCOPE, kind: Kind[Spec, Status] = THING
) -> Committed[Resource[Spec, Status]]:
    return await store.transact(
        lambda draft: draft.delete(kind, scope, name),
        actor="tester",
        action="delete",
        touches=[kind.key(scope, name)],
    )


async def put_together(store: Store, names: Sequence[str], value: int) -> int:
    """One transaction that puts several things."""

    def change(draft: Draft) -> None:
        for name in names:
            draft.put(THING, SCOPE, name, spec=Spec(value=value))

    done = await store.transact(
        change, actor="tester", action="put", touches=[THING.key(SCOPE, name) for name in names]
    )
    return done.revision


async def taken(watch: Watch, until: int) -> list[EventBatch]:
    """Batches until the watch has reached a revision."""
    batches: list[EventBatch] = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        while watch.revision < until:
            batches.append(await watch.next(idle_seconds=0.05))
    return batches


def flat(batches: Sequence[EventBatch]) -> list[Event]:
    return [event for batch in batches for event in batch.events]


def told(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """Events as (type, name, value)."""
    return [(event.type.value, event.resource.name, event.resource.spec.value) for event in events]


async def audit_of(store: Store) -> audit.ChainVerdict:
    return audit.verify([row async for row in store.audit()], store.audit_head())


async def asked(store: Store, statement: str) -> object:
    """What SQLite answers on the connection that writes; None if nothing."""
    writer = store._engine._writer  # type: ignore[attr-defined]
    row = await writer.run(lambda connection: connection.execute(statement).fetchone())
    return None if row is None else row[0]


class FaultyEngine:
    """A real engine behind a gate, failing when told to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_after = asyncio.Event()
        """Closed: a commit has happened, but does not return."""
        self.gate_after.set()
        self.committed = asyncio.Event()
        self.commits: list[WriteGroup] = []
        self.committing = asyncio.Event()
        self.fail_before: Exception | None = None
        """Raised by the next commit instead of committing."""
        self.fail_after: Exception | None = None
        """Raised by the next commit although it committed."""
        self.unreadable = 0
        """How many times asking what became of a group will fail."""

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        self.committing.set()
        await self.gate.wait()
        self.commits.append(group)
        if (error := self.fail_before) is not None:
            self.fail_before = None
            raise error
        outcome = await self._engine.commit(group)
        self.committed.set()
        await self.gate_after.wait()
        if (error := self.fail_after) is not None:
            self.fail_after = None
            raise error
        return outcome

    async def settle(self, before: DatabaseMark, group_id: bytes, author: GroupAuthor) -> GroupOutcome:
        if self.unreadable > 0:
            self.unreadable -= 1
            from fleetplane.kernel.errors import Unavailable

            raise Unavailable("the disk is gone")
        return await self._engine.settle(before, group_id, author)

    async def mark(self) -> DatabaseMark:
        return await self._engine.mark()

    async def groups(self, *, after: int, limit: int) -> GroupPage:
        return await self._engine.groups(after=after, limit=limit)

    async def trim(self, limit: int) -> int:
        return await self._engine.trim(limit)

    async def lineage(self) -> str:
        return await self._engine.lineage()

    def load(self, kinds: Sequence[str]) -> AbstractAsyncContextManager[StoreContents]:
        return self._engine.load(kinds)

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        return await self._engine.history(kind, after=after, until=until, limit=limit)

    async def history_bytes(self) -> int:
        return await self._engine.history_bytes()

    async def history_horizon(self, size_bytes: int) -> int:
        return await self._engine.history_horizon(size_bytes)

    async def secret(self, name: str) -> bytes | None:
        return await self._engine.secret(name)

    async def secret_names(self, prefix: str) -> Sequence[str]:
        return await self._engine.secret_names(prefix)

    async def audit_row(self, seq: int) -> audit.Row | None:
        return await self._engine.audit_row(seq)

    def audit(self, *, after: int = 0) -> AsyncGenerator[Sequence[audit.Row], None]:
        return self._engine.audit(after=after)

    async def close(self) -> None:
        await self._engine.close()


@asynccontextmanager
async def opened_faulty(path: Path, **settings: Any) -> AsyncIterator[tuple[Store, FaultyEngine]]:
    made = StoreSettings(path=path, **settings)
    engine = FaultyEngine(await SqliteEngine.open(made))
    try:
        async with Store.on(engine, made, kinds=KINDS, clock=SystemClock()) as store:
            try:
                yield store, engine
            finally:
                engine.gate.set()
                engine.gate_after.set()
    finally:
        await engine.close()
