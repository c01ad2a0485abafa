"""Several real stores over one database in memory, in virtual time, and what can go wrong between them.

One seed is one history. Servers start, follow, take over, are cut off, stopped and killed; clients write
through all of them, and watchers look at all of them. What must hold is checked at every group that is
written, at every group that any server applies, and at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.shared.memory_engine import SECOND_NS, Defects, Link, MemoryDatabase, MemoryEngine
from support.shared.repeating_client import MADE, KeyedServer, Outside, repeat
from support.shared.storekit import KINDS, SCOPE, THING, Spec
from support.shared.virtual_loop import LoopClock, run

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.errors import (
    AlreadyExists,
    Compacted,
    FleetplaneError,
    IntegrityError,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from fleetplane.kernel.store import ABSENT, Draft, Store, StoreSettings
from fleetplane.kernel.store import engine as store_log
from fleetplane.kernel.store.engine import Claim, Claimed, GroupAuthor, LoggedGroup, LogType
from fleetplane.kernel.store.group import GroupState, TransactionResult
from fleetplane.kernel.store.queue import Submission
from fleetplane.kernel.store.servers.leader_lease import LIFE_SECONDS
from fleetplane.kernel.store.servers.replica import Replica
from fleetplane.kernel.store.writer import GroupAttempt, StoreWriter
from fleetplane.kernel.watch import Event, EventType

SERVERS = 3
CLIENTS = 4
REPEATERS = 2
TAKEOVER_SECONDS = 10.0
SLOW_SHARE = 0.2
SLOW = 30
"""How much later the database answers a server that is slow."""
KEY = b"k" * 32
TOKENS = [f"token{n}" for n in range(5)]
LEASE = "lease-"
LEASE_MILLISECONDS = 3000
CLOCK_ERROR_SECONDS = 1.5
"""What two servers may differ in about the database's clock, when that answers late."""
MILLISECOND_NS = 1_000_000


class Violation(AssertionError):
    """Something that must never be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass
class State:
    """What the log amounts to at one number."""

    revisions: dict[str, int] = field(default_factory=dict)
    claims: dict[Claim, str] = field(default_factory=dict)


class Judge:
    """Knows the log as it was written, and holds every server against it."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self.states: dict[int, State] = {0: State()}
        self._terms: dict[int, GroupAuthor] = {}
        self._checked_audit = 0
        self._last_hash = audit.GENESIS
        append = database._append

        def checked(*given: object) -> None:
            append(*given)  # type: ignore[arg-type]
            self.written(database.head)

        database._append = checked  # type: ignore[method-assign, assignment]

    def written(self, group: LoggedGroup) -> None:
        """After every group: numbers, one author per term, nobody who has ended, one audit chain."""
        number = group.mark.number
        require(number == len(self.states), f"group {number} follows group {len(self.states) - 1}")
        author = group.author
        if author.term:
            require(author.term >= max(self._terms, default=0), f"group {number} is of an old term")
            first = self._terms.setdefault(author.term, author)
            require(first == author, f"{author} and {first} both wrote under one term")
        else:
            row, now = self._database.servers[author.server], self._database.now_ns()
            silent = (now - row.renewed_at_ns) / SECOND_NS
            require(row.boot == author.boot, f"group {number} is of a process that has ended")
            require(silent <= LIFE_SECONDS, f"group {number} is of a server not heard of for {silent:.0f} s")
        for entry in self._database.audit[self._checked_audit :]:
            link = audit.link(self._last_hash, entry.entry, KEY)
            require(link == entry.hash, f"audit entry {entry.seq} does not continue the chain")
            self._last_hash = link
        self._checked_audit = len(self._database.audit)
        require(group.mark.audit_hash == self._last_hash, f"group {number} is not at the chain's end")
        # From the tables, not from the log: what the log must amount to.
        revisions = {row.name: row.revision for row in self._database.resources.values()}
        self.states[number] = State(revisions, dict(self._database.claims))

    def applied(self, name: str, store: Store) -> None:
        """After every group that a server applied."""
        require(store._applier.mark.number in self.states, "a group that broke a rule is shown")
        state = self.states[store._applier.mark.number]
        revisions = {thing.name: thing.revision for thing in store._view.of(THING.name).live.values()}
        where = f"{name} at group {store._applier.mark.number}"
        wrong = {*revisions.items()} ^ {*state.revisions.items()} if revisions != state.revisions else ()
        require(not wrong, f"{where} shows something else than the log: {wrong}")
        require(store._view.claims == state.claims, f"{where} knows other claims than the database")

    def watched(self, name: str, cursor: int, events: list[Event], until: int) -> None:
        """Every watcher has every event after its cursor, each once and in order."""
        logged = [
            (row.revision, row.type)
            for group in self._database.groups
            for row in group.log
            if row.kind == THING.name and cursor < row.revision <= until
        ]
        seen = [(event.revision, event.type.value) for event in events]
        require(seen == logged, f"a watcher on {name} saw {len(seen)} events, the log has {len(logged)}")

    def owners(self) -> None:
        for claim, owners in self._database.owners.items():
            require(len(owners) == 1, f"{claim.value} was redeemed by {owners}")

    def folded(self) -> None:
        """The log amounts to the tables."""
        state = State()
        for group in self._database.groups:
            for row in group.log:
                said = store_log.read(row)
                if isinstance(said, Claimed):
                    if row.type == LogType.CLAIMED:
                        state.claims[said.claim] = said.owner
                    else:
                        state.claims.pop(said.claim, None)
                elif row.kind == THING.name:
                    thing = THING.decode(row.body)
                    if row.type == EventType.DELETED:
                        del state.revisions[thing.name]
                    else:
                        state.revisions[thing.name] = thing.revision
        last = self.states[self._database.head.mark.number]
        require(state == last, "the log does not amount to what the database holds")


class Server:
    """One server: its processes, one after another."""

    def __init__(self, sim: Simulation, name: str) -> None:
        self._sim = sim
        self.name = name
        self.link = Link(chance=sim.chance)
        self.is_active = False
        self.standing_by: Replica | None = None
        self.keyed: KeyedServer | None = None
        self._process: asyncio.Task[None] | None = None

    async def live(self) -> None:
        """Start again whenever it ends, however that was."""
        while True:
            chance, delay = self._sim.chance, self._sim.delay_seconds
            if chance.random() < SLOW_SHARE and delay < 0.01:
                delay *= SLOW
            self.link = Link(chance=chance, loss=self._sim.loss, delay_seconds=delay)
            self._process = asyncio.create_task(self._run())
            await asyncio.wait([self._process])
            self.standing_by = self.keyed = None
            if not self._process.cancelled() and (error := self._process.exception()) is not None:
                if not isinstance(error, FleetplaneError):
                    raise error
                self._sim.ends.append(type(error).__name__)
            await asyncio.sleep(self._sim.chance.uniform(0.1, 3.0))

    async def _run(self) -> None:
        sim = self._sim
        engine = MemoryEngine(sim.database, self.link)
        clock = LoopClock(sim.chance, sim.chance.choice([0.0, 3600.0, -3600.0]))
        settings = StoreSettings(
            path=Path("/nowhere"),
            history_revisions=sim.history,
            history_slack_revisions=5,
            ring_events=100_000,
            coalesce_after_events=100_000,
        )
        standby = await Replica.load(
            engine, settings, server=self.name, kinds=KINDS, clock=clock, audit_key=KEY
        )
        store = standby.store
        self._observe(store)
        self.keyed = KeyedServer(store, store.clock, sim.chance, sim.outside)
        _put_in(sim.defects, store, sim.database)
        cursor, seen = store.revision, list[Event]()
        watch = store.watch(THING, after=cursor)
        watching = asyncio.create_task(_take(watch, seen))
        self.standing_by = standby
        try:
            async with standby.active():
                sim.became_active(self.name)
                self.is_active = True
                await store.writing()
        finally:
            self.is_active = False
            sim.losses += store._writer.losses
            sim.locked += store._writer.locked
            until = watch.revision
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            sim.judge.watched(self.name, cursor, [event for event in seen if event.revision <= until], until)

    def _observe(self, store: Store) -> None:
        show = store._applier._show

        def shown(*given: object) -> None:
            show(*given)  # type: ignore[arg-type]
            self._sim.judge.applied(self.name, store)

        store._applier._show = shown  # type: ignore[method-assign, assignment]

    def kill(self) -> None:
        """The process is gone at once: nothing of it reaches the database any more but what is on its way."""
        self.link.cut = True
        if self.keyed is not None:
            self.keyed.kill()
        if self._process is not None:
            self._process.cancel()


def _put_in(defects: Defects, store: Store, database: MemoryDatabase) -> None:
    """The defects that are a server's own."""
    if defects.own_group_applied_twice:
        _apply_twice(store, database)
    if defects.refusal_from_a_stale_view:
        _answer_at_once(store._writer)
    if defects.first_answer_is_kept:
        _keep_first_answers(store._writer)
    if defects.key_is_kept_after_its_effect:
        store._hooks = {}
    if defects.sweep_by_local_clock:
        own = store.clock._clock  # type: ignore[attr-defined]
        store._writer.clock = own


def _answer_at_once(writer: StoreWriter) -> None:
    attempt = writer._attempt

    async def answered(made: GroupAttempt) -> GroupAttempt:
        return await attempt(made) if made.group.changed else made

    writer._attempt = answered  # type: ignore[method-assign, assignment]


def _keep_first_answers(writer: StoreWriter) -> None:
    draft, first = writer._draft, dict[Submission, TransactionResult | None]()

    def kept(submissions: Sequence[Submission]) -> GroupAttempt:
        made = draft(submissions)
        made.results = [first.setdefault(*pair) for pair in zip(submissions, made.results, strict=False)]
        return made

    writer._draft = kept  # type: ignore[method-assign]


def _apply_twice(store: Store, database: MemoryDatabase) -> None:
    applier = store._applier
    own = applier.own

    def twice(group: GroupState) -> None:
        own(group)
        logged = database.group(group.after().number)
        assert logged is not None
        events = [event for row in logged.log if (event := applier._change(row, {})) is not None]
        applier._hub.publish(events, logged.mark.revision)

    applier.own = twice  # type: ignore[method-assign]


async def _take(watch: object, seen: list[Event]) -> None:
    with suppress(Unavailable):
        async for batch in watch:  # type: ignore[attr-defined]
            seen += batch.events


@dataclass
class Told:
    """What clients were told."""

    acknowledged: dict[str, int] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    redeemed: dict[str, str] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    """When each was made, which must not end before its time."""
    unknown: int = 0
    swept: int = 0
    refusals: int = 0


class Simulation:
    def __init__(
        self,
        seed: int,
        *,
        seconds: float = 10.0,
        defects: Defects | None = None,
        trouble: str = "all",
        repeaters: int | None = None,
        delay_seconds: float = 0.002,
    ) -> None:
        """With the trouble "kill", the active server is killed now and then, and all else is well; with
        "kills", any of them. `repeaters` ask with keys; unless said otherwise, in every other history.

        `delay_seconds` is what a question to the database, and its answer, take at most.
        """
        self.delay_seconds = delay_seconds
        self.chance = random.Random(seed)
        self._trouble_is_death = trouble == "kill"
        self._trouble_is_kills = trouble == "kills"
        self._repeaters = (REPEATERS, 0)[seed % 2] if repeaters is None else repeaters
        self._seconds = seconds
        self.defects = defects or Defects()
        self.loss = 0.0 if self._trouble_is_death else self.chance.choice([0.0, 0.01, 0.05])
        self.history = self.chance.choice([20, 1000])
        self.told = Told()
        self.outside = Outside()
        self.kills = 0
        self.ends: list[str] = []
        self.takeovers: list[float] = []
        self._vacant_since: float | None = None
        self._number = 0
        self._wrong: list[BaseException] = []
        """What was found while nobody was waiting for it: requests that arrived late."""

    def run(self) -> None:
        run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._note)
        self.database = MemoryDatabase(LoopClock(self.chance).now_ns, self.defects)
        self.judge = Judge(self.database)
        self.servers = [Server(self, f"s{n}") for n in range(SERVERS)]
        tasks = [loop.create_task(server.live()) for server in self.servers]
        tasks += [loop.create_task(self._client(n)) for n in range(CLIENTS)]
        tasks += [loop.create_task(self._repeater(n)) for n in range(self._repeaters)]
        tasks += [loop.create_task(self._reader()), loop.create_task(self._roamer())]
        tasks += [loop.create_task(self._trouble())]
        end = loop.create_task(asyncio.sleep(self._seconds))
        try:
            await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await self._quiet()
        finally:
            for task in (end, *tasks):
                task.cancel()
            for server in self.servers:
                server.kill()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*left, return_exceptions=True)
            if self._wrong:
                raise self._wrong[0]
        self._judge()

    async def _quiet(self) -> None:
        """Everything is mended: within ten seconds somebody is active, and takes a write."""
        for server in self.servers:
            server.link.loss, server.link.cut = 0.0, False
            server.link.stopped.set()
        self.calm = True
        deadline = asyncio.get_running_loop().time() + TAKEOVER_SECONDS + 5.0
        while asyncio.get_running_loop().time() < deadline:
            if await self._write("last"):
                return
            await asyncio.sleep(0.2)
        raise Violation("nobody is active although everything is mended")

    def _note(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if (error := context.get("exception")) is not None:
            self._wrong.append(error)

    def _judge(self) -> None:
        database, told = self.database, self.told
        if self._wrong:
            raise self._wrong[0]
        self.judge.owners()
        self.judge.folded()
        values = {row.name: THING.decode(row.body).spec.value for row in database.resources.values()}
        for name, value in told.acknowledged.items():
            require(values.get(name) == value, f"{name} was acknowledged and is lost")
        for name in told.refused:
            require(name not in values, f"{name} was refused and is there")
        self._judge_keys(values)
        for token, owner in told.redeemed.items():
            require(
                database.owners[Claim(THING.name, SCOPE, "token", token)] == [owner],
                f"{token} was redeemed by {owner}, as it was told, and not by it, as it is kept",
            )

    def _judge_keys(self, values: Collection[str]) -> None:
        """Of each key one thing was made, and nobody was called twice."""
        made: dict[str, set[str]] = {}
        for name in values:
            if name.startswith(MADE):
                made.setdefault(name.partition(".")[0], set()).add(name)
        for key, names in made.items():
            require(len(names) == 1, f"one key, {len(names)} things: {names}")
            require(self.outside.called[key] <= 1, f"for {key} somebody was called twice")
        for key, names in self.outside.told.items():
            require(names == made.get(key), f"{key} is said to have made {names}, and made {made.get(key)}")

    # Who is active.

    def became_active(self, name: str) -> None:
        if self._vacant_since is not None:
            self.takeovers.append(asyncio.get_running_loop().time() - self._vacant_since)
            self._vacant_since = None

    def _active(self) -> Server | None:
        active = [server for server in self.servers if server.is_active]
        return self.chance.choice(active) if active else None

    # Clients.

    async def _client(self, number: int) -> None:
        while True:
            await asyncio.sleep(self.chance.expovariate(4.0))
            match self.chance.random():
                case luck if luck < 0.3:
                    await self._redeem(self.chance.choice(TOKENS), f"client{number}")
                case luck if luck < 0.4:
                    await self._look_up()
                case luck if luck < 0.5:
                    await self._take_lease()
                case luck if luck < 0.6:
                    await self._sweep()
                case _:
                    await self._write(f"c{number}")

    async def _write(self, client: str) -> bool:
        """Make something new; True if it was acknowledged."""
        store = self._writable()
        if store is None:
            return False
        self._number += 1
        name, value = f"{client}-{self._number}", self._number

        def change(draft: Draft) -> None:
            draft.put(THING, SCOPE, name, spec=Spec(value=value), expect=ABSENT)
            draft.put(THING, SCOPE, f"{client}-last", spec=Spec(value=value))

        touches = [THING.key(SCOPE, name), THING.key(SCOPE, f"{client}-last")]
        try:
            await store.transact(change, actor=client, action="write", touches=touches)
        except OutcomeUnknown:
            self.told.unknown += 1
            return False
        except Unavailable:
            self.told.refused.add(name)
            return False
        self.told.acknowledged[name] = value
        return True

    async def _redeem(self, token: str, owner: str) -> None:
        store = self._writable()
        if store is None:
            return
        with suppress(AlreadyExists, Unavailable):
            await store.transact(
                lambda draft: draft.claim(THING, SCOPE, "token", token, owner),
                actor=owner,
                action="redeem",
                touches=[],
            )
            before = self.told.redeemed.setdefault(token, owner)
            require(before == owner, f"{token} was redeemed by {before} and by {owner}, both were told so")

    async def _repeater(self, number: int) -> None:
        """Somebody who asks with a key, and again wherever he can until he hears the answer."""
        chance = self.chance
        for key in itertools.count(number, self._repeaters):
            await asyncio.sleep(chance.expovariate(1.0))
            await repeat(f"{MADE}{key}", self._keyed, self.outside, pause=lambda: chance.expovariate(4.0))

    def _keyed(self) -> KeyedServer | None:
        server = self._any()
        return None if server is None else server.keyed

    def _writable(self) -> Store | None:
        """Any server writes, active or not."""
        server = self._any()
        return None if server is None or server.standing_by is None else server.standing_by.store

    async def _look_up(self) -> None:
        """A transaction that finds something missing was not told so by a server that is behind."""
        store, known = self._writable(), list(self.told.acknowledged)[-4:]
        if store is None or not known:
            return
        name = self.chance.choice(known)

        def change(draft: Draft) -> None:
            if draft.get(THING, SCOPE, name) is None:
                raise NotFound(name)

        try:
            await store.transact(change, actor="reader", action="look", touches=[])
        except NotFound as error:
            raise Violation(f"{name} was refused as unknown, and had been acknowledged") from error
        except Unavailable:
            return
        self.told.refusals += 1

    async def _take_lease(self) -> None:
        store = self._writable()
        if store is None:
            return
        self._number += 1
        name = f"{LEASE}{self._number}"

        def change(draft: Draft) -> None:
            ends = draft.now_ns // MILLISECOND_NS + LEASE_MILLISECONDS
            draft.put(THING, SCOPE, name, spec=Spec(value=ends), expect=ABSENT)

        self.told.leases[name] = asyncio.get_running_loop().time()
        with suppress(Unavailable):
            await store.transact(change, actor="lease", action="take", touches=[THING.key(SCOPE, name)])

    async def _sweep(self) -> None:
        """Whatever has expired goes; nothing goes before its time, whatever a server's own clock shows."""
        store = self._writable()
        if store is None:
            return
        known = [thing.name for thing in store.list(THING, SCOPE) if thing.name.startswith(LEASE)]

        def change(draft: Draft) -> list[str]:
            now = draft.now_ns // MILLISECOND_NS
            found = [draft.get(THING, SCOPE, name) for name in known]
            over = [thing.name for thing in found if thing is not None and thing.spec.value <= now]
            for name in over:
                draft.delete(THING, SCOPE, name)
            return over

        touches = [THING.key(SCOPE, name) for name in known]
        with suppress(Unavailable):
            swept = (await store.transact(change, actor="sweep", action="sweep", touches=touches)).value
            now = asyncio.get_running_loop().time()
            for name in swept:
                age = now - self.told.leases[name]
                require(age >= LEASE_MILLISECONDS / 1000 - CLOCK_ERROR_SECONDS, f"{name} ended after {age} s")
            self.told.swept += len(swept)

    # Readers.

    def _any(self) -> Server | None:
        """A server that answers reads: one that stands by, or the active one."""
        up = [server for server in self.servers if server.standing_by is not None]
        return self.chance.choice(up) if up else None

    async def _confirmed(self, server: Server, *, asks: bool = True) -> Store | None:
        """The store of a server, once it is sure that it is up to date; None if it cannot be."""
        standby = server.standing_by
        if standby is None or standby.store._hub.closed:
            return None
        if asks:
            try:
                await standby.index.confirm()
            except (Unavailable, IntegrityError):
                return None
        return standby.store if server.standing_by is standby and not standby.store._hub.closed else None

    async def _reader(self) -> None:
        """Whatever was acknowledged before a read began is in its answer, on whichever server."""
        while True:
            await asyncio.sleep(self.chance.expovariate(2.0))
            server, known = self._any(), list(self.told.acknowledged)[-8:]
            if server is None:
                continue
            store = await self._confirmed(server, asks=not self.defects.read_from_a_stale_view)
            if store is not None:
                self.reads += 1
                live = store._view.of(THING.name).live
                missing = [name for name in known if (SCOPE, name) not in live]
                require(not missing, f"{server.name} says that there is no {missing}, which was acknowledged")

    async def _roamer(self) -> None:
        """A watcher that goes on elsewhere, again and again, has every event once."""
        cursor = -1
        while True:
            await asyncio.sleep(self.chance.uniform(0.1, 0.6))
            server = self._any()
            if server is None:
                continue
            waits = not self.defects.cursor_from_the_future_refused
            store = await self._confirmed(server, asks=waits)
            if store is None or (waits and not await store.reached(cursor) and store._hub.closed):
                continue
            if cursor < store._hub.compacted:
                cursor = store.revision
            try:
                watch = store.watch(THING, after=cursor)
            except Compacted as error:
                raise Violation(f"a watcher was sent away by {server.name}: {error.message}") from error
            except Unavailable:  # it has just ended
                continue
            seen: list[Event] = []
            with suppress(TimeoutError, Compacted):
                async with asyncio.timeout(self.chance.uniform(0.2, 1.5)):
                    await _take(watch, seen)
            if seen:
                self.judge.watched(server.name, cursor, seen, seen[-1].revision)
                cursor = seen[-1].revision
                self.moves += 1
            watch.close()

    # Trouble.

    calm = False
    losses = 0
    locked = 0
    reads = 0
    moves = 0

    async def _trouble(self) -> None:
        while not self.calm:
            await asyncio.sleep(self.chance.expovariate(0.6))
            if self.calm:
                return
            self.chance.choice(self._troubles())()

    def _troubles(self) -> list[Callable[[], object]]:
        server = self._active()
        if server is None or self.chance.random() < 0.4:
            server = self.chance.choice(self.servers)
        if self._trouble_is_death:
            return [self._kill_active]
        if self._trouble_is_kills:
            return [self._kill_anyone]
        return [server.kill, server.kill, lambda: self._cut(server), lambda: self._stop(server)]

    def _kill_active(self) -> None:
        server = self._active()
        if server is not None and self._vacant_since is None:
            self._vacant_since = asyncio.get_running_loop().time()
            server.kill()

    def _kill_anyone(self) -> None:
        if (server := self._any()) is not None:
            self.kills += 1
            server.kill()

    def _cut(self, server: Server) -> None:
        link = server.link
        link.cut = True
        later = self.chance.uniform(0.1, 20.0)
        asyncio.get_running_loop().call_later(later, lambda: setattr(link, "cut", False))

    def _stop(self, server: Server) -> None:
        link = server.link
        link.stopped.clear()
        asyncio.get_running_loop().call_later(self.chance.uniform(0.1, 20.0), link.stopped.set)
