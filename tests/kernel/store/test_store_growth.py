"""What is kept of the past is bounded by number, bytes and age: a store that is written to levels off."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from support.shared.storekit import THING, Spec, Status, flat, opened, put, put_together, remove, taken

from fleetplane.kernel.audit.archive import Means, verify_file
from fleetplane.kernel.audit.checkpoints import CheckpointSigner
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Compacted
from fleetplane.kernel.resources import Kind
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.history import HistoryBounds, HistoryKeeper
from fleetplane.sections.process import AuditSection
from fleetplane.server.audit_keeper import AuditKeeper
from fleetplane.sim.clock import VirtualClock

LARGE: Kind[Spec, Status] = Kind("large", Spec, Status, is_logged=False)
DAY_SECONDS = 86_400


async def test_history_is_bounded_by_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        for number in range(50):
            await put(store, f"n{number}", padding="x" * 10_000)
        bounds = HistoryBounds(size_bytes=100_000, age_days=30)
        assert await HistoryKeeper(store, SystemClock(), bounds).sweep() > 30
        assert 50_000 < await store.history_bytes() <= 100_000
        compacted = store.statistics().compacted
        with pytest.raises(Compacted):
            store.watch(THING, after=compacted - 1)
        rest = flat(await taken(store.watch(THING, after=compacted), store.revision))
        assert [event.revision for event in rest] == list(range(compacted + 1, 51))
        assert await HistoryKeeper(store, SystemClock(), bounds).sweep() == 0


async def test_history_is_bounded_by_age(tmp_path: Path) -> None:
    clock = VirtualClock()
    settings = StoreSettings(path=tmp_path / "store.db")
    async with Store.open(settings, kinds=[THING], clock=clock) as store:
        keeper = HistoryKeeper(store, clock, HistoryBounds(size_bytes=1 << 30, age_days=2))
        await put_together(store, ["a", "b", "c"], 1)
        await clock.advance(1.5 * DAY_SECONDS)
        await put_together(store, ["a", "b"], 2)
        assert await keeper.sweep() == 0
        await clock.advance(1 * DAY_SECONDS)
        assert await keeper.sweep() == 3, "the first transaction, and nothing else"
        await clock.advance(5 * DAY_SECONDS)
        await keeper.sweep()
        assert store.statistics().compacted == store.revision == 5
        await put(store, "a", 3)
        assert await keeper.sweep() == 0


async def test_what_never_changes_is_stored_once_and_still_watched(tmp_path: Path) -> None:
    """Of such kinds the log has the name; whoever resumes is told of what is still there."""
    settings = StoreSettings(path=tmp_path / "store.db", ring_events=1, tombstones=1)
    async with Store.open(settings, kinds=[THING, LARGE], clock=SystemClock()) as store:
        await put(store, "first", kind=LARGE, padding="x" * 100_000)
        begin = store.revision
        for number in range(3):
            await put(store, f"n{number}", number, kind=LARGE, padding="x" * 100_000)
        await remove(store, "n1", kind=LARGE)
        await remove(store, "first", kind=LARGE)
        await put(store, "other")
        assert await store.history_bytes() < 10_000
    async with Store.open(settings, kinds=[THING, LARGE], clock=SystemClock()) as store:
        events = flat(await taken(store.watch(LARGE, after=begin), store.revision))
        assert [(event.type, event.resource.name) for event in events] == [
            ("ADDED", "n0"),
            ("ADDED", "n2"),
            ("DELETED", "first"),
        ]
        assert len(events[1].resource.spec.padding) == 100_000
        assert [event.revision for event in events] == [begin + 1, begin + 3, begin + 5]
    assert (await verify_file(tmp_path / "store.db")).intact


async def test_a_store_that_is_written_to_for_ever_levels_off(tmp_path: Path) -> None:
    """A short form of a long run: after the first rounds the files stop growing, archives apart."""
    path, clock = tmp_path / "store.db", SystemClock()
    key, signer = hashlib.sha256(b"k").digest(), CheckpointSigner(hashlib.sha256(b"s").digest())
    settings = StoreSettings(path=path, history_revisions=1000, history_slack_revisions=50)
    sizes: list[int] = []
    async with Store.open(settings, kinds=[THING], clock=clock, audit_key=lambda _: key) as store:
        history = HistoryKeeper(store, clock, HistoryBounds(size_bytes=200_000, age_days=30))
        archives = AuditKeeper(
            store, signer, clock, AuditSection(keep_entries=1000), directory=tmp_path / "audit", anchors=[]
        )
        for _ in range(8):
            for start in range(0, 1500, 100):
                turns = range(start, start + 100)
                await asyncio.gather(
                    *(put(store, f"n{n % 50}", n, padding=f"{n}" * 40) for n in turns),
                    store.put_secret("proxies/audit/x", b"s" * 500),
                )
            await history.sweep()
            while await archives.archive():
                pass
            sizes.append(path.stat().st_size + path.with_name("store.db-wal").stat().st_size)
    assert archives.archived > 5000
    assert max(sizes[4:]) <= max(sizes[:4]) * 1.1, sizes
    means = Means(key=key, public=signer.public, archives=tmp_path / "audit")
    verdict = await verify_file(path, means=means)
    assert verdict.intact, verdict
    assert verdict.entries > 12_000
