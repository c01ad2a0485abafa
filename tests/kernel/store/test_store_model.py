"""Store and watch against a dictionary, under random histories.

The bounds are tiny, so that watchers fall off the ring, tombstones run out and history is
compacted all the time.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.shared.storekit import SCOPE, THING, Spec, audit_of, opened

from fleetplane.kernel.errors import AlreadyExists, Compacted, Conflict, NotFound
from fleetplane.kernel.store import ABSENT, Draft, Expect, Store
from fleetplane.kernel.watch import EventBatch, EventType, Watch

pytestmark = pytest.mark.slow

T = TypeVar("T")
State = dict[str, int]

NAMES = st.sampled_from(["a", "b", "c", "d"])
CHANGES = st.dictionaries(NAMES, st.sampled_from([None, None, 1, 2, 3]), min_size=1, max_size=3)
"""A transaction: the new value of each name, None to delete it."""
WATCHERS_LIMIT = 5


class Model:
    """The whole store: what every name is worth, at each revision."""

    def __init__(self) -> None:
        self.states: list[State] = [{}]

    def change(self, changes: dict[str, int | None]) -> None:
        """Each name that changes takes a revision of its own, in the transaction's order."""
        for name, value in changes.items():
            after = {**self.states[-1], name: value}
            state = {name: value for name, value in after.items() if value is not None}
            if state != self.states[-1]:
                self.states.append(state)


class Follower:
    """A watcher and what it makes of the events it is told."""

    def __init__(self, watch: Watch, held: State) -> None:
        self.watch = watch
        self.held = dict(held)
        self.cut = False
        """Went on within a batch once: may hear of changes to what it was spared the beginning of."""
        self.whole_from = 0
        """The end of that batch. Before it, what comes and goes within the batch may be missing."""

    def apply(self, batch: EventBatch) -> None:
        last = 0
        for event in batch.events:
            name = event.resource.name
            assert event.revision > last
            last = event.revision
            assert event.resource.revision == event.revision
            assert self.cut or (event.type is EventType.ADDED) == (name not in self.held)
            if event.type is EventType.DELETED:
                self.held.pop(name, None)
            else:
                self.held[name] = event.resource.spec.value
        assert last <= batch.revision


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        # In memory where possible: these histories are about order, not about disks.
        memory = Path("/dev/shm")
        self.directory = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
        self.model = Model()
        self.followers: list[Follower] = []
        self.bounds: dict[str, int] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, 60))

    @initialize(
        ring=st.sampled_from([1, 4, 12]),
        tombstones=st.sampled_from([1, 3, 50]),
        coalesce=st.sampled_from([1, 3, 50]),
        history=st.sampled_from([12, 1000]),
    )
    def begin(self, ring: int, tombstones: int, coalesce: int, history: int) -> None:
        self.bounds = {
            "ring_events": ring,
            "tombstones": tombstones,
            "coalesce_after_events": coalesce,
            "history_revisions": history,
            "history_slack_revisions": 2,
            "replay_page_events": 2,
            "group_limit": 3,
        }
        self.start()
        for _ in range(3):
            self.watch(back=0)

    def start(self) -> None:
        path = Path(self.directory.name) / "store.db"
        self.opening: AbstractAsyncContextManager[Store] = opened(path, **self.bounds)
        self.store = self.run(self.opening.__aenter__())

    def stop(self) -> None:
        self.run(self.opening.__aexit__(None, None, None))

    def teardown(self) -> None:
        try:
            if self.bounds:
                assert self.run(audit_of(self.store)).intact
                self.stop()
        finally:
            self.runner.close()
            self.directory.cleanup()

    # Writing.

    async def transact(self, changes: dict[str, int | None], expect: Expect = None) -> None:
        def change(draft: Draft) -> None:
            for name, value in changes.items():
                if value is None and draft.get(THING, SCOPE, name) is None:
                    continue
                if value is None:
                    draft.delete(THING, SCOPE, name)
                else:
                    draft.put(THING, SCOPE, name, spec=Spec(value=value), expect=expect)

        touches = [THING.key(SCOPE, name) for name in changes]
        await self.store.transact(change, actor="model", action="change", touches=touches)

    @rule(changes=CHANGES)
    def write(self, changes: dict[str, int | None]) -> None:
        self.run(self.transact(changes))
        self.model.change(changes)

    @rule(several=st.lists(CHANGES, min_size=2, max_size=8))
    def write_concurrently(self, several: Sequence[dict[str, int | None]]) -> None:
        async def together() -> None:
            await asyncio.gather(*(self.transact(changes) for changes in several))

        self.run(together())
        for changes in several:
            self.model.change(changes)

    @rule(changes=CHANGES, wrong=st.sampled_from([ABSENT, -1]))
    def fail_a_precondition(self, changes: dict[str, int | None], wrong: Expect) -> None:
        name = next(iter(changes))
        present = name in self.model.states[-1]
        if wrong is ABSENT and not present:
            return
        wanted = AlreadyExists if wrong is ABSENT else Conflict if present else NotFound
        bad = {other: value for other, value in changes.items() if other != name} | {name: 9}

        def change(draft: Draft) -> None:
            for other, value in bad.items():
                if other != name:
                    draft.put(THING, SCOPE, other, spec=Spec(value=value or 0))
            draft.put(THING, SCOPE, name, spec=Spec(value=9), expect=wrong)

        touches = [THING.key(SCOPE, other) for other in bad]
        with pytest.raises(wanted):
            self.run(self.store.transact(change, actor="model", action="refused", touches=touches))

    # Watching.

    @precondition(lambda self: len(self.followers) < WATCHERS_LIMIT)
    @rule(back=st.integers(0, 12))
    def watch(self, back: int) -> None:
        after = max(0, self.store.revision - back)
        compacted = self.store.statistics().compacted
        if after < compacted:
            with pytest.raises(Compacted):
                self.store.watch(THING, SCOPE, after=after)
            return
        self.followers.append(Follower(self.store.watch(THING, SCOPE, after=after), self.model.states[after]))

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, WATCHERS_LIMIT))
    def read_to_the_end(self, which: int) -> None:
        follower = self.followers[which % len(self.followers)]
        while follower in self.followers and follower.watch.revision < self.store.revision:
            self.read(which, 1)

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, WATCHERS_LIMIT), batches=st.integers(1, 4))
    def read(self, which: int, batches: int) -> None:
        follower = self.followers[which % len(self.followers)]
        for _ in range(batches):
            before = follower.watch.revision
            try:
                batch = self.run(follower.watch.next(idle_seconds=0))
            except Compacted:
                assert before < self.store.statistics().compacted
                follower.watch.close()
                self.followers.remove(follower)
                return
            follower.apply(batch)
            # Atomic, and reliable: exactly the state of that revision, however it was told.
            if batch.revision >= follower.whole_from:
                assert follower.held == self.model.states[batch.revision]
            assert follower.watch.revision == batch.revision >= before
            if not batch.events:
                assert batch.revision == self.store.revision

    @precondition(lambda self: self.followers)
    @rule(which=st.integers(0, WATCHERS_LIMIT), received=st.integers(1, 5))
    def be_cut_off_within_a_batch(self, which: int, received: int) -> None:
        """Resuming after any event that was received loses nothing."""
        follower = self.followers.pop(which % len(self.followers))
        try:
            batch = self.run(follower.watch.next(idle_seconds=0))
        except Compacted:
            batch = EventBatch(revision=follower.watch.revision)
        follower.watch.close()
        got = batch.events[:received]
        after = got[-1].revision if got else batch.revision
        follower.cut = True
        follower.whole_from = max(follower.whole_from, batch.revision)
        follower.apply(EventBatch(revision=after, events=got))
        if after >= self.store.statistics().compacted:
            follower.watch = self.store.watch(THING, SCOPE, after=after)
            self.followers.append(follower)

    @precondition(lambda self: len(self.followers) > 2)
    @rule(which=st.integers(0, WATCHERS_LIMIT))
    def leave(self, which: int) -> None:
        self.followers.pop(which % len(self.followers)).watch.close()

    # Time passing.

    @precondition(lambda self: self.store.revision - self.store.statistics().compacted > 6)
    @rule(back=st.integers(0, 6))
    def compact(self, back: int) -> None:
        self.run(self.store.compact(self.store.revision + 1 - back))

    @rule()
    def restart(self) -> None:
        """Every watcher resumes where it was, or learns that it cannot."""
        before, self.followers = self.followers, []
        self.stop()
        self.start()
        for follower in before:
            revision = follower.watch.revision
            if revision < self.store.statistics().compacted:
                with pytest.raises(Compacted):
                    self.store.watch(THING, SCOPE, after=revision)
            else:
                follower.watch = self.store.watch(THING, SCOPE, after=revision)
                self.followers.append(follower)

    @invariant()
    def the_store_says_what_the_model_says(self) -> None:
        assert self.store.revision == len(self.model.states) - 1
        assert {thing.name: thing.spec.value for thing in self.store.list(THING)} == self.model.states[-1]
        assert [thing.name for thing in self.store.list(THING)] == sorted(self.model.states[-1])

    @invariant()
    def memory_stays_within_its_bounds(self) -> None:
        statistics = self.store.statistics()
        assert statistics.ring_events <= self.bounds["ring_events"]
        assert statistics.tombstones <= self.bounds["tombstones"]
        assert statistics.watchers == len(self.followers)
        # The slack, and the group of three transactions of three changes that used it up.
        assert statistics.revision - statistics.compacted <= self.bounds["history_revisions"] + 2 + 9


TestStoreAgainstModel = StoreMachine.TestCase
TestStoreAgainstModel.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
