"""The log holds every change: whoever reads it from the beginning arrives at what the store holds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.shared.storekit import OTHER, SCOPE, THING, Spec, asked, opened, opened_faulty, put, remove

from fleetplane.kernel.errors import FleetplaneError
from fleetplane.kernel.store import Draft, Store
from fleetplane.kernel.store import engine as store_log
from fleetplane.kernel.store.engine import Claim, Claimed, HorizonMoved, LogRow, LogType, SecretChanged
from fleetplane.kernel.store.group import BYTES_LIMIT, ROWS_LIMIT
from fleetplane.kernel.watch import EventType


class Fold:
    """What the log amounts to."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], int] = {}
        self.claims: dict[Claim, str] = {}
        self.secrets: dict[str, int] = {}
        self.compacted = 0

    def apply(self, row: LogRow) -> None:
        match store_log.read(row):
            case None:
                kind = THING if row.kind == THING.name else OTHER
                resource = kind.decode(row.body)
                if row.type == EventType.DELETED:
                    del self.values[row.kind, resource.name]
                else:
                    self.values[row.kind, resource.name] = resource.spec.value
            case Claimed() as claimed if row.type == LogType.CLAIMED:
                assert claimed.claim not in self.claims, "nobody takes what somebody holds"
                self.claims[claimed.claim] = claimed.owner
            case Claimed() as claimed:
                del self.claims[claimed.claim]
            case SecretChanged() as changed if row.type == LogType.SECRET:
                self.secrets[changed.name] = changed.version
            case SecretChanged() as changed:
                self.secrets.pop(changed.name, None)
            case HorizonMoved() as moved:
                self.compacted = moved.compacted


async def folded(store: Store) -> Fold:
    fold, number, revision = Fold(), 0, 0
    while True:
        page = await store._engine.groups(after=number, limit=7)
        for group in page.groups:
            assert group.mark.number == number + 1, "numbers have no gaps"
            for row in group.log:
                assert row.revision >= revision
                revision = row.revision
                fold.apply(row)
            number, revision = group.mark.number, group.mark.revision
        if number == page.head.number:
            return fold


def _change(chance: random.Random) -> Callable[[Draft], None]:
    name, value, who = f"n{chance.randrange(4)}", chance.randrange(100), f"o{chance.randrange(2)}"
    what = chance.randrange(6)

    def change(draft: Draft) -> None:
        if what < 2:
            draft.put(THING, SCOPE, name, spec=Spec(value=value))
        if what == 2 and draft.get(THING, SCOPE, name) is not None:
            draft.delete(THING, SCOPE, name)
        if what in (1, 3):
            draft.claim(THING, SCOPE, "slug", name, who)
        if what == 4:
            draft.release(THING, SCOPE, "slug", name, draft.claimed_by(THING, SCOPE, "slug", name) or "")
            draft.put(OTHER, SCOPE, name, spec=Spec(value=value))
        if what in (0, 5):
            draft.put_secret(name, bytes([value]))
        if what == 5 and value > 50:
            draft.delete_secret(name)

    return change


@pytest.mark.parametrize("seed", range(4))
async def test_the_log_amounts_to_what_the_store_holds(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    touches = [kind.key(SCOPE, f"n{n}") for kind in (THING, OTHER) for n in range(4)]
    async with opened(tmp_path / "store.db") as store:
        for _ in range(20):
            changes = [_change(chance) for _ in range(chance.randrange(1, 12))]
            await asyncio.gather(
                *(store.transact(change, actor="t", action="x", touches=touches) for change in changes),
                return_exceptions=True,
            )
        fold = await folded(store)
        live = {
            (thing.kind, thing.name): thing.spec.value
            for kind in (THING, OTHER)
            for thing in store.list(kind)
        }
        assert fold.values == live
        assert fold.claims == dict(store.claims(THING))
        assert sorted(fold.secrets) == list(await store.secret_names())
        for name, version in fold.secrets.items():
            assert await asked(store, f"SELECT version FROM secrets WHERE name = '{name}'") == version
        assert len(live) > 2
        assert fold.claims


async def test_secrets_are_logged_by_name_and_version_and_never_by_content(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        await store.put_secret("door", b"open sesame")
        await store.put_secret("door", b"open barley")
        await store.delete_secret("door")
        page = await store._engine.groups(after=0, limit=10)
        rows = [row for group in page.groups for row in group.log]
        assert [(row.type, store_log.read(row)) for row in rows] == [
            (LogType.SECRET, SecretChanged("door", 1)),
            (LogType.SECRET, SecretChanged("door", 2)),
            (LogType.DROPPED, SecretChanged("door", 3)),
        ]
        assert not any(b"open" in row.body for row in rows)
        assert store.revision == 0


async def test_a_claim_released_and_taken_again_within_one_group_changes_hands(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):

        async def act(work: Callable[[Draft], None]) -> None:
            await store.transact(work, actor="t", action="claim", touches=[])

        await act(lambda draft: draft.claim(THING, SCOPE, "slug", "x", "a"))
        await asyncio.gather(
            act(lambda draft: draft.release(THING, SCOPE, "slug", "x", "a")),
            act(lambda draft: draft.claim(THING, SCOPE, "slug", "x", "b")),
        )
        assert len(engine.commits) == 2
        assert store.claimed_by(THING, SCOPE, "slug", "x") == "b"
        assert (await folded(store)).claims == dict(store.claims(THING))
    async with opened(tmp_path / "store.db") as store:
        assert store.claimed_by(THING, SCOPE, "slug", "x") == "b"


async def test_the_horizon_is_logged_and_what_lies_behind_it_goes(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db", history_revisions=10, history_slack_revisions=5) as store:
        for value in range(40):
            await put(store, "x", value)
        compacted = store.statistics().compacted
        assert compacted >= 25
        async with asyncio.timeout(60):
            while await asked(store, "SELECT min(revision) FROM log") < compacted:  # type: ignore[operator]
                await asyncio.sleep(0.01)
        page = await store._engine.groups(after=0, limit=100)
        assert page.groups[0].mark.number > 1
        moved = [store_log.read(row) for group in page.groups for row in group.log if not row.kind]
        assert moved[-1] == HorizonMoved(compacted)
        rows = await asked(
            store, "SELECT count(*) FROM groups WHERE revision < (SELECT max(compacted) FROM groups)"
        )
        assert rows == 0


async def test_a_group_is_bounded_by_rows_and_bytes_and_order_is_kept(tmp_path: Path) -> None:
    async with opened_faulty(tmp_path / "store.db") as (store, engine):
        engine.gate.clear()
        writes = [asyncio.create_task(put(store, "first"))]
        async with asyncio.timeout(60):
            await engine.committing.wait()
        large = BYTES_LIMIT // 4
        writes += [asyncio.create_task(put(store, f"n{n}", n, padding="x" * large)) for n in range(10)]
        writes += [asyncio.create_task(remove(store, "n9"))]
        await asyncio.sleep(0)
        engine.gate.set()
        await asyncio.gather(*writes)
        sizes = [sum(len(row.body) for row in group.log) for group in engine.commits]
        assert [len(group.audit) for group in engine.commits] == [1, 4, 4, 3]
        assert max(sizes) < BYTES_LIMIT + large + 1024
        assert len(store.list(THING)) == 10

        def many(start: int) -> Callable[[Draft], None]:
            def change(draft: Draft) -> None:
                for n in range(ROWS_LIMIT // 2):
                    draft.put(OTHER, SCOPE, f"m{start + n}", spec=Spec())

            return change

        starts = range(0, 3 * ROWS_LIMIT // 2, ROWS_LIMIT // 2)
        await asyncio.gather(
            *(
                store.transact(
                    many(start),
                    actor="t",
                    action="many",
                    touches=[OTHER.key(SCOPE, f"m{start + n}") for n in range(ROWS_LIMIT // 2)],
                )
                for start in starts
            )
        )
        assert [len(group.log) for group in engine.commits[4:]] == [ROWS_LIMIT, ROWS_LIMIT // 2]


async def test_a_commit_that_breaks_the_database_s_own_rules_fails_alone(tmp_path: Path) -> None:
    """A defect that would give one claim to two is stopped by the table, and the store goes on."""
    async with opened(tmp_path / "store.db") as store:
        await asked(store, "INSERT INTO claims VALUES ('thing', 'org/a', 'slug', 'x', 'somebody')")
        with pytest.raises(FleetplaneError, match="contradicts"):
            await store.transact(
                lambda draft: draft.claim(THING, SCOPE, "slug", "x", "a"), actor="t", action="x", touches=[]
            )
        assert store.claimed_by(THING, SCOPE, "slug", "x") is None
        assert (await put(store, "y")).revision == 1
