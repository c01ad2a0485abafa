"""A database in memory that several stores share, and a link to it that delays, loses and repeats.

The database is right by construction: each call is one step. Everything that goes wrong happens on a link:
a request or its answer is late or lost, and a lost request may still arrive after its sender has given up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.store.engine import (
    Claim,
    ClaimRow,
    DatabaseMark,
    GroupAuthor,
    GroupOutcome,
    GroupPage,
    HistoryPage,
    LoggedGroup,
    LogRow,
    ResourceRow,
    StoreContents,
    WriteGroup,
)
from fleetplane.kernel.store.servers.engine import Drafting, LeaseRenewal
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS
from fleetplane.kernel.store.servers.level import SUPPORTED, Levels

R = TypeVar("R")
EMPTY = DatabaseMark(number=0, revision=0, compacted=0, audit_seq=0, audit_hash=audit.GENESIS)
SECOND_NS = 1_000_000_000
LOCK_SECONDS = 1.0
"""How long a server that says nothing keeps the lock: `idle_in_transaction_session_timeout`."""


@dataclass(kw_only=True)
class Defects:
    """What can be put in, to see that it is found."""

    number_is_not_checked: bool = False
    claims_are_not_logged: bool = False
    absence_is_failure: bool = False
    """A commit in doubt that is not there yet is taken for one that never will be."""
    head_without_its_log: bool = False
    """The last group is read before what it changed, as by one statement that also waits for the lock."""
    take_over_is_unconditional: bool = False
    own_group_applied_twice: bool = False
    """A server applies what it wrote from memory, and once more from the log."""
    term_is_not_checked: bool = False
    """The database numbers what arrives itself, and takes it from a server that was replaced, too."""
    read_from_a_stale_view: bool = False
    """A server says what there is not, without having asked the database."""
    refusal_from_a_stale_view: bool = False
    """A transaction that changes nothing is answered without having asked the database."""
    boot_is_not_checked: bool = False
    """The database takes groups from a server that it has not heard of for long."""
    first_answer_is_kept: bool = False
    """Whoever came too late is told what came out of the first attempt, and not of the one that is kept."""
    sweep_by_local_clock: bool = False
    """Transactions are dated by the wall clock of the server that runs them."""
    lock_is_not_waited_for: bool = False
    """Groups are written while a server has the lock, and has read the end of the log."""
    key_is_kept_after_its_effect: bool = False
    """That a request was carried out is recorded once its answer is known."""
    cursor_from_the_future_refused: bool = False
    """A watch that comes from a server that was further is told that its cursor is not known."""


@dataclass(kw_only=True)
class _Server:
    boot: int = 0
    levels: Levels = SUPPORTED
    renewed_at_ns: int = 0


class MemoryDatabase:
    def __init__(self, now_ns: Callable[[], int], defects: Defects | None = None) -> None:
        self._now_ns = now_ns
        self.defects = defects or Defects()
        self.lineage = "lineage"
        self.groups: list[LoggedGroup] = [
            LoggedGroup(id=b"", author=GroupAuthor(), mark=EMPTY, log=(), at_ns=now_ns())
        ]
        self.first = 0
        """The number of the first group that is kept."""
        self.resources: dict[tuple[str, str, str], ResourceRow] = {}
        self.kinds: dict[str, int] = {}
        self.claims: dict[Claim, str] = {}
        self.secrets: dict[str, bytes] = {}
        self.audit: list[audit.Row] = []
        self.servers: dict[str, _Server] = {}
        self.seats: list[GroupAuthor] = [GroupAuthor()]
        self.heard: dict[tuple[str, str], float] = {}
        self.locked_by: object | None = None
        self.released = asyncio.Event()
        self.owners: dict[Claim, list[str]] = {}
        """Of each claim, everybody who ever held it."""

    @property
    def head(self) -> LoggedGroup:
        return self.groups[-1]

    def now_ns(self) -> int:
        return self._now_ns()

    def group(self, number: int) -> LoggedGroup | None:
        at = number - self.groups[0].mark.number
        return self.groups[at] if 0 <= at < len(self.groups) else None

    def outcome(self, *, written: bool, alive: bool = True) -> GroupOutcome:
        head = self.head
        return GroupOutcome(
            written=written, mark=head.mark, author=head.author, now_ns=self._now_ns(), alive=alive
        )

    # The lock of all writes, held by a server for at most as long as it may be idle in a transaction.

    def lock(self, holder: object) -> None:
        self.locked_by = holder
        asyncio.get_running_loop().call_later(LOCK_SECONDS, self.unlock, holder)

    def unlock(self, holder: object) -> None:
        if self.locked_by is holder:
            self.locked_by = None
            released, self.released = self.released, asyncio.Event()
            released.set()

    # What servers ask.

    def is_alive(self, author: GroupAuthor) -> bool:
        """Whether an author may write."""
        if author.term or not author.server:
            return author.term == self.seats[-1].term or self.defects.term_is_not_checked
        row = self.servers[author.server]
        if self.defects.boot_is_not_checked:
            return True
        return row.boot == author.boot and row.renewed_at_ns > self._now_ns() - LIFE_SECONDS * SECOND_NS

    def commit(self, group: WriteGroup) -> GroupOutcome:
        if not self.is_alive(group.author):
            return self.outcome(written=False, alive=False)
        if self.defects.term_is_not_checked and 0 < group.author.term != self.seats[-1].term:
            group = replace(group, after=replace(group.after, number=self.head.mark.number + 1))
        elif group.before.number != self.head.mark.number and not self.defects.number_is_not_checked:
            return self.outcome(written=False)
        held = {**self.claims}
        for claim in group.releases:
            held.pop(claim, None)
        for row in group.claims:
            if Claim(*row[:4]) in held:
                raise IntegrityError(f"{row} has an owner")
        self._write(group)
        return self.outcome(written=True)

    def _write(self, group: WriteGroup) -> None:
        for put in group.puts:
            self.resources[put[:3]] = put
        for key in group.deletes:
            self.resources.pop(key, None)
        for claim in group.releases:
            self.claims.pop(claim, None)
        for row in group.claims:
            self.claims[Claim(*row[:4])] = row.owner
            self.owners.setdefault(Claim(*row[:4]), []).append(row.owner)
        for secret in group.secrets:
            self.secrets[secret.name] = secret.blob
        for (name,) in group.secret_deletes:
            self.secrets.pop(name, None)
        self.kinds.update(group.kinds)
        self.audit += group.audit
        self._append(group.after, group.author, group.id, tuple(group.log))

    def _append(
        self, mark: DatabaseMark, author: GroupAuthor, group_id: bytes, log: Sequence[LogRow]
    ) -> None:
        if self.defects.claims_are_not_logged:
            log = [row for row in log if row.type not in ("CLAIMED", "RELEASED")]
        self.groups.append(LoggedGroup(id=group_id, author=author, mark=mark, log=log, at_ns=self._now_ns()))

    def settle(self, before: DatabaseMark, group_id: bytes, author: GroupAuthor) -> GroupOutcome:
        found = self.group(before.number + 1)
        if found is not None:
            return self.outcome(written=found.id == group_id)
        alive = self.is_alive(author)
        if self.defects.absence_is_failure:
            head = self.head.mark
            return replace(self.outcome(written=False), mark=replace(head, number=before.number + 1))
        if alive:
            self._append(replace(self.head.mark, number=before.number + 1), author, b"settled", ())
        return self.outcome(written=False, alive=alive)

    def enlist(self, server: str, levels: Levels = SUPPORTED) -> int:
        row = self.servers.setdefault(server, _Server())
        row.levels = levels
        row.boot += 1
        row.renewed_at_ns = self._now_ns()
        return row.boot

    def renew(self, author: GroupAuthor) -> LeaseRenewal:
        row = self.servers[author.server]
        alive = row.boot == author.boot and (author.term == 0 or self.seats[-1].term == author.term)
        if alive:
            row.renewed_at_ns = self._now_ns()
        return LeaseRenewal(alive=alive, holder=self.seats[-1], now_ns=self._now_ns())

    def living(self, life_seconds: float) -> dict[str, int]:
        since = self._now_ns() - life_seconds * SECOND_NS
        return {name: row.boot for name, row in self.servers.items() if row.renewed_at_ns > since}

    def supported(self, life_seconds: float) -> list[Levels]:
        return [self.servers[name].levels for name in self.living(life_seconds)]

    def hear(self, channel: str, seconds_ago: Mapping[str, float]) -> None:
        for agent, ago in seconds_ago.items():
            at = self._now_ns() / SECOND_NS - ago
            self.heard[channel, agent] = max(at, self.heard.get((channel, agent), at))

    def heard_ago(self, channel: str) -> dict[str, float]:
        now = self._now_ns() / SECOND_NS
        return {agent: now - at for (where, agent), at in self.heard.items() if where == channel}

    def leave(self, author: GroupAuthor) -> None:
        row = self.servers[author.server]
        if row.boot == author.boot:
            row.renewed_at_ns = 0

    def take_over(self, before: DatabaseMark, author: GroupAuthor, life_seconds: float) -> GroupOutcome:
        holder = self.seats[-1]
        row = self.servers.get(holder.server)
        living = (
            row is not None
            and (row.boot == holder.boot or holder.server != author.server)
            and row.renewed_at_ns > self._now_ns() - life_seconds * SECOND_NS
        )
        ended = self.servers[author.server].boot != author.boot
        behind = self.head.mark.number != before.number
        if (behind and not self.defects.take_over_is_unconditional) or living or ended:
            return self.outcome(written=False)
        term = holder.term + 1
        self.servers[author.server].renewed_at_ns = self._now_ns()
        taken = author._replace(term=term)
        self.seats.append(taken)
        self._append(replace(before, number=before.number + 1), taken, b"took over", ())
        return self.outcome(written=True)

    def page(self, after: int, limit: int) -> GroupPage:
        kept = [group for group in self.groups if group.mark.number >= self.first]
        rows, groups = 0, list[LoggedGroup]()
        for group in kept:
            if group.mark.number > after and (not groups or rows + len(group.log) <= limit):
                groups.append(group)
                rows += len(group.log)
            elif group.mark.number > after:
                break
        if self.defects.head_without_its_log and groups and groups[-1].mark == self.head.mark:
            groups[-1] = replace(groups[-1], log=())
        before = next((group.mark for group in kept if group.mark.number == after), None)
        return GroupPage(head=self.head.mark, before=before, groups=groups)

    def history(self, kind: str, after: int, until: int, limit: int) -> HistoryPage:
        compacted = self.head.mark.compacted
        low = max(after, compacted)
        rows = [
            row
            for group in self.groups
            for row in group.log
            if row.kind == kind and low < row.revision <= until
        ]
        return HistoryPage(compacted=compacted, events=rows, complete=True)

    def trim(self) -> int:
        horizon = self.head.mark.compacted
        first = next(group.mark.number for group in self.groups if group.mark.revision >= horizon)
        gone = sum(len(group.log) for group in self.groups if self.first <= group.mark.number < first)
        self.first = max(self.first, first)
        return gone


@dataclass(kw_only=True)
class Link:
    """How one server reaches the database."""

    chance: random.Random
    delay_seconds: float = 0.002
    loss: float = 0.0
    """The share of calls of which the request or the answer is lost."""
    cut: bool = False
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the server runs; a stopped one neither sends nor hears."""

    def __post_init__(self) -> None:
        self.stopped.set()

    async def call(self, act: Callable[[], R], database: MemoryDatabase | None = None) -> R:
        """Ask; if a database is given, what is asked waits for its lock."""
        if not self.stopped.is_set():
            await self.stopped.wait()
        await asyncio.sleep(self.chance.random() * self.delay_seconds)
        if self.cut or self.chance.random() < self.loss:
            return await self._lost(act, database)
        while database is not None and database.locked_by is not None:
            await database.released.wait()
        result = act()
        # Some answers are there at once, others after what was sent later has been done.
        late = self.chance.random()
        await asyncio.sleep(0 if late < 0.7 else late * self.delay_seconds)
        if not self.stopped.is_set():
            await self.stopped.wait()
        if self.cut or self.chance.random() < self.loss:
            raise Unavailable("the answer was lost")
        return result

    async def _lost(self, act: Callable[[], R], database: MemoryDatabase | None) -> R:
        if self.chance.random() < 0.5:  # on its way all the same, and nobody will hear of it
            loop = asyncio.get_running_loop()
            loop.call_later(self.chance.uniform(0, 3.0), _late, act, database)
        raise Unavailable("the connection was lost")


def _late(act: Callable[[], object], database: MemoryDatabase | None) -> None:
    if database is not None and database.locked_by is not None:
        asyncio.get_running_loop().call_later(LOCK_SECONDS / 10, _late, act, database)
        return
    with suppress(IntegrityError, Unavailable):
        act()


class MemoryEngine:
    def __init__(self, database: MemoryDatabase, link: Link) -> None:
        self._database = database
        self.link = link

    @property
    def _lock(self) -> MemoryDatabase | None:
        return None if self._database.defects.lock_is_not_waited_for else self._database

    async def commit(self, group: WriteGroup) -> GroupOutcome:
        return await self.link.call(lambda: self._database.commit(group), self._lock)

    async def commit_alone(self, *, after: int, limit: int, draft: Drafting) -> GroupOutcome | None:
        database, holder = self._database, object()

        def locked() -> GroupPage:
            database.lock(holder)
            return database.page(after, limit)

        def written(group: WriteGroup) -> GroupOutcome:
            if database.locked_by is not holder and not database.defects.lock_is_not_waited_for:
                raise Unavailable("the transaction was ended, it was idle")
            if database.defects.lock_is_not_waited_for:  # it believes that nobody else has written
                group = replace(group, before=database.head.mark)
            outcome = database.commit(group)
            database.unlock(holder)
            return outcome

        page = await self.link.call(locked, database)  # if its answer is lost, the lock is, for a while
        group: WriteGroup | None = None
        try:
            last = page.groups[-1].mark.number if page.groups else after
            if last == page.head.number:
                group = await draft(page)
        finally:
            if group is None and not self.link.cut and self.link.stopped.is_set():
                database.unlock(holder)
        return None if group is None else await self.link.call(lambda: written(group))

    async def settle(self, before: DatabaseMark, group_id: bytes, author: GroupAuthor) -> GroupOutcome:
        return await self.link.call(lambda: self._database.settle(before, group_id, author), self._lock)

    async def groups(self, *, after: int, limit: int) -> GroupPage:
        return await self.link.call(lambda: self._database.page(after, limit))

    async def trim(self, limit: int) -> int:
        return await self.link.call(self._database.trim)

    async def mark(self) -> DatabaseMark:
        return await self.link.call(lambda: self._database.head.mark)

    async def lineage(self) -> str:
        return self._database.lineage

    async def enlist(self, server: str, levels: Levels = SUPPORTED) -> int:
        return await self.link.call(lambda: self._database.enlist(server, levels))

    async def renew(self, author: GroupAuthor, number: int = 0) -> LeaseRenewal:
        del number  # only shown to people
        return await self.link.call(lambda: self._database.renew(author))

    async def take_over(self, before: DatabaseMark, author: GroupAuthor, life_seconds: float) -> GroupOutcome:
        return await self.link.call(
            lambda: self._database.take_over(before, author, life_seconds), self._lock
        )

    @asynccontextmanager
    async def load(self, kinds: Sequence[str]) -> AsyncIterator[StoreContents]:
        yield await self.link.call(lambda: self._loaded(kinds))

    def _loaded(self, kinds: Sequence[str]) -> StoreContents:
        database = self._database
        rows = [row for row in database.resources.values() if row.kind in kinds]

        async def pages() -> AsyncIterator[Sequence[ResourceRow]]:
            yield rows

        return StoreContents(
            mark=database.head.mark,
            lineage=database.lineage,
            first_revision=0,
            kinds=dict(database.kinds),
            claims=[ClaimRow(*claim, owner) for claim, owner in database.claims.items()],
            resources=pages(),
        )

    async def resource(self, kind: str, scope: str, name: str) -> ResourceRow | None:
        return await self.link.call(lambda: self._database.resources.get((kind, scope, name)))

    async def history(self, kind: str, *, after: int, until: int, limit: int) -> HistoryPage:
        return await self.link.call(lambda: self._database.history(kind, after, until, limit))

    async def history_bytes(self) -> int:
        return 0

    async def history_horizon(self, size_bytes: int) -> int:
        return 0

    async def secret(self, name: str) -> bytes | None:
        return await self.link.call(lambda: self._database.secrets.get(name))

    async def secret_names(self, prefix: str) -> Sequence[str]:
        return sorted(name for name in self._database.secrets if name.startswith(prefix))

    async def audit_row(self, seq: int) -> audit.Row | None:
        return next((row for row in self._database.audit if row.seq == seq), None)

    async def audit(self, *, after: int = 0) -> AsyncGenerator[Sequence[audit.Row], None]:
        yield [row for row in self._database.audit if row.seq > after]

    async def leave(self, author: GroupAuthor) -> None:
        await self.link.call(lambda: self._database.leave(author))

    async def hear(self, channel: str, seconds_ago: Mapping[str, float]) -> None:
        await self.link.call(lambda: self._database.hear(channel, seconds_ago))

    async def heard(self, channel: str) -> Mapping[str, float]:
        return await self.link.call(lambda: self._database.heard_ago(channel))

    async def forget_heard(self, channel: str, agents: Sequence[str]) -> None:
        for agent in agents:
            await self.link.call(lambda agent=agent: self._database.heard.pop((channel, agent), None))  # type: ignore[misc]

    async def trim_heard(self, channel: str, older_seconds: float) -> None:
        old = [agent for agent, ago in (await self.heard(channel)).items() if ago > older_seconds]
        await self.forget_heard(channel, old)

    async def living(self, life_seconds: float) -> Mapping[str, int]:
        return await self.link.call(lambda: self._database.living(life_seconds))

    async def supported(self, life_seconds: float) -> Sequence[Levels]:
        return await self.link.call(lambda: self._database.supported(life_seconds))

    async def close(self) -> None:
        pass
