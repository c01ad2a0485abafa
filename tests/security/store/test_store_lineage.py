"""A database that was lost, set back or replaced is refused, and nobody's old cursor passes for a new one."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.shared.storekit import KINDS, SCOPE, THING, put, put_together

from fleetplane import settings as configuration
from fleetplane.domains.gpus.grpc.device_api import GpuReader
from fleetplane.domains.gpus.kinds import GPU
from fleetplane.domains.gpus.kinds import SCOPE as GPU_SCOPE
from fleetplane.domains.gpus.registry import Gpus
from fleetplane.domains.gpus.rules import GpuPolicy
from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.audit.archive import verify_file
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Compacted, FleetplaneError, IntegrityError, NotFound
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.store.lineage import MarkFile, first_revision
from fleetplane.server.offline import DATABASE, DataDirectory, MasterKeys

CLOCK = SystemClock()


def place(tmp_path: Path) -> DataDirectory:
    tmp_path.mkdir(exist_ok=True)
    return DataDirectory(configuration.load(config=None, flags={"data_dir": str(tmp_path)}), CLOCK)


def opened_as_server(tmp_path: Path, *, environment_key: str = "") -> object:
    flags = {"data_dir": str(tmp_path)}
    settings = configuration.load(config=None, flags=flags)
    keys = MasterKeys(settings, CLOCK)
    if environment_key:
        keys._given = environment_key
    wanted = StoreSettings(
        path=tmp_path / DATABASE,
        first_revision=first_revision(CLOCK.now_ns()),
        evidence=() if environment_key else (tmp_path / "master.key",),
    )
    return Store.open(
        wanted, kinds=KINDS, clock=CLOCK, audit_key=lambda is_new: keys.audit(may_create=is_new)
    )


async def filled(tmp_path: Path, count: int = 3) -> int:
    async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
        for number in range(count):
            await put(store, f"n{number}", number)
        return int(store.revision)


# Missing.


@pytest.mark.parametrize("how", ["missing", "empty"])
@pytest.mark.parametrize("left", ["master.key", DATABASE + ".mark"])
async def test_a_database_that_is_gone_is_not_begun_anew(tmp_path: Path, how: str, left: str) -> None:
    await filled(tmp_path)
    for file in tmp_path.iterdir():
        if file.name != left:
            file.unlink()
    if how == "empty":
        (tmp_path / DATABASE).touch()
    kept = (tmp_path / left).read_bytes()
    with pytest.raises(IntegrityError, match="although") as refused:
        async with opened_as_server(tmp_path):  # type: ignore[attr-defined]
            pass
    assert "fleetplane restore" in refused.value.advice
    assert (tmp_path / left).read_bytes() == kept
    database = tmp_path / DATABASE
    assert not database.exists() or database.stat().st_size == 0, "nothing was written"


async def test_a_first_start_with_a_key_from_the_environment_is_a_first_start(tmp_path: Path) -> None:
    key = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
    async with opened_as_server(tmp_path, environment_key=key) as store:  # type: ignore[attr-defined]
        await put(store, "x")
    assert not (tmp_path / "master.key").exists()


async def test_a_missing_master_key_is_not_replaced(tmp_path: Path) -> None:
    await filled(tmp_path)
    (tmp_path / "master.key").unlink()
    with pytest.raises(IntegrityError, match=r"master key .* is missing"):
        async with opened_as_server(tmp_path):  # type: ignore[attr-defined]
            pass
    assert not (tmp_path / "master.key").exists()


async def test_another_master_key_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    await filled(tmp_path)
    (tmp_path / "master.key").unlink()
    MasterKey.from_file(tmp_path / "master.key", CLOCK)
    before = (tmp_path / DATABASE).read_bytes()
    with pytest.raises(IntegrityError, match="not made with this master key"):
        async with opened_as_server(tmp_path):  # type: ignore[attr-defined]
            pass
    assert (tmp_path / DATABASE).read_bytes() == before


async def test_a_version_of_another_lineage_is_not_taken_for_nothing_has_changed(tmp_path: Path) -> None:
    """A server that begins with nothing, and has no GPU yet: who comes with a version has seen some."""
    settings = StoreSettings(path=tmp_path / DATABASE, first_revision=first_revision(CLOCK.now_ns()))
    for _ in range(2):  # also after a restart
        async with Store.open(settings, kinds=[GPU], clock=CLOCK) as store:
            reader = GpuReader(store, Gpus(store, GpuPolicy()))
            for version in (1, 500, settings.first_revision - 1):
                with pytest.raises(Compacted):
                    store.watch(GPU, GPU_SCOPE, after=await reader._resume_from(version))
            listed = store.kind_revision(GPU)  # what a list of nothing is of, and may be watched from
            assert store.watch(GPU, GPU_SCOPE, after=await reader._resume_from(listed)).revision == listed


# Set back.


def killed_with_a_log(tmp_path: Path) -> int:
    """A store that was killed while most of what it had acknowledged was in its log only."""
    script = (
        "import asyncio, os, signal, sys, time\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_store_lineage import DATABASE, MarkFile, opened_as_server\n"
        "from support.shared.storekit import put\n"
        "async def main():\n"
        "    async with opened_as_server(Path(sys.argv[1])) as store:\n"
        "        for number in range(50):\n"
        "            await put(store, f'late{number}', number)\n"
        "        mark = MarkFile(Path(sys.argv[1]) / DATABASE)\n"
        "        while (found := mark.read()) is None or found.revision != store.revision:\n"
        "            await asyncio.sleep(0.05)\n"
        "        print(store.revision, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(tests)],
        env={**os.environ, "PYTHONPATH": str(tests.parent.parent)},
        stdout=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    return int(done.stdout)


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped"])
async def test_a_lost_log_is_told_and_refused_until_its_owner_accepts_the_loss(
    tmp_path: Path, damage: str
) -> None:
    before = await filled(tmp_path)
    acknowledged = killed_with_a_log(tmp_path)
    log = tmp_path / (DATABASE + "-wal")
    content = log.read_bytes()
    if damage == "removed":
        log.unlink()
        (tmp_path / (DATABASE + "-shm")).unlink()
    elif damage == "cut":
        log.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        log.write_bytes(content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :])

    for _ in range(2):  # refused again: looking at it must not make it acceptable
        with pytest.raises(IntegrityError, match="had been acknowledged") as refused:
            async with opened_as_server(tmp_path):  # type: ignore[attr-defined]
                pass
        assert "fleetplane store accept-loss" in refused.value.advice

    loss = place(tmp_path).accept_loss(actor="owner/root")
    assert before <= loss.revision < loss.acknowledged == acknowledged
    async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
        assert store.lineage != loss.lineage
        entries = [audit.read(row) async for row in store.audit()]
        assert (entries[-1].actor, entries[-1].action) == ("owner/root", "store.accept-loss")
        assert str(acknowledged) in entries[-1].changes[0].name
        assert store.kind_revision(THING) > acknowledged, "what is listed is listed under the new lineage"
        for cursor in (before, loss.revision, acknowledged, acknowledged + 1):
            with pytest.raises(Compacted):
                store.watch(THING, after=cursor)
        await put(store, "new")
    with pytest.raises(NotFound):
        place(tmp_path).accept_loss(actor="owner/root")
    assert (await verify_file(tmp_path / DATABASE, place(tmp_path).audit_key())).intact


async def test_an_older_copy_put_in_place_of_the_database_is_refused(tmp_path: Path) -> None:
    await filled(tmp_path)
    shutil.copy(tmp_path / DATABASE, tmp_path / "copy.db")
    async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
        await put_together(store, ["a", "b"], 1)
    shutil.copy(tmp_path / "copy.db", tmp_path / DATABASE)
    with pytest.raises(IntegrityError, match="an older copy"):
        async with opened_as_server(tmp_path):  # type: ignore[attr-defined]
            pass


async def test_another_past_of_the_same_length_is_refused(tmp_path: Path) -> None:
    await filled(tmp_path)
    shutil.copy(tmp_path / DATABASE, tmp_path / "copy.db")
    mark = (tmp_path / (DATABASE + ".mark")).read_bytes()
    async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
        await put(store, "first", 1)
    truth = (tmp_path / (DATABASE + ".mark")).read_bytes()
    shutil.copy(tmp_path / "copy.db", tmp_path / DATABASE)
    (tmp_path / (DATABASE + ".mark")).write_bytes(mark)
    async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
        await put(store, "other", 2)
    (tmp_path / (DATABASE + ".mark")).write_bytes(truth)
    with pytest.raises(IntegrityError, match="another audit entry"):
        async with opened_as_server(tmp_path):  # type: ignore[attr-defined]
            pass


async def test_a_database_of_another_lineage_is_refused(tmp_path: Path) -> None:
    await filled(tmp_path / "one")
    await filled(tmp_path / "two", 5)
    shutil.copy(tmp_path / "two" / DATABASE, tmp_path / "one" / DATABASE)
    with pytest.raises(IntegrityError, match="not the database that was here"):
        async with opened_as_server(tmp_path / "one"):  # type: ignore[attr-defined]
            pass


async def test_a_mark_that_was_lost_or_torn_is_no_reason_to_refuse(tmp_path: Path) -> None:
    await filled(tmp_path)
    mark = tmp_path / (DATABASE + ".mark")
    for content in (None, b"", b"{}", mark.read_bytes()[:40], os.urandom(512)):
        mark.unlink()
        if content is not None:
            mark.write_bytes(content)
        async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
            recorded = MarkFile(tmp_path / DATABASE).read()
            assert recorded is not None
            assert recorded.revision == store.revision


async def test_the_mark_follows_within_a_second(tmp_path: Path) -> None:
    import asyncio

    async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
        await put(store, "x")
        async with asyncio.timeout(60):
            while (recorded := MarkFile(tmp_path / DATABASE).read()) is None or (
                recorded.revision != store.revision
            ):
                await asyncio.sleep(0.05)


def test_a_lineage_that_begins_later_counts_from_above() -> None:
    now_ns = CLOCK.now_ns()
    busiest = 50_000  # changes a second, for a whole day
    assert first_revision(now_ns + 86_400 * 10**9) > first_revision(now_ns) + busiest * 86_400
    assert first_revision(now_ns + 500 * 365 * 86_400 * 10**9) < 2**53
    assert first_revision(0) == 0
    # Also within the second in which the old one began.
    assert first_revision(now_ns + 10**7) > first_revision(now_ns) + 600


# Damaged.


async def test_flipped_bytes_end_in_a_sentence(tmp_path: Path) -> None:
    """Never in a traceback: whatever is found in the file is an error that we can explain, or not seen."""
    await filled(tmp_path, 20)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = (tmp_path / DATABASE).read_bytes()
    mark = (tmp_path / (DATABASE + ".mark")).read_bytes()
    source = random.Random(12)
    refused = 0
    for _ in range(80):
        damaged = bytearray(whole)
        for _ in range(source.choice((1, 8, 200))):
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        for name in ("-wal", "-shm"):
            (tmp_path / (DATABASE + name)).unlink(missing_ok=True)
        (tmp_path / DATABASE).write_bytes(damaged)
        (tmp_path / (DATABASE + ".mark")).write_bytes(mark)
        try:
            async with opened_as_server(tmp_path) as store:  # type: ignore[attr-defined]
                assert isinstance(store.get(THING, SCOPE, "n1"), object)
        except FleetplaneError as error:
            refused += 1
            assert error.message
    assert refused > 10
    gc.collect()  # a connection that was left open is an error here, and not in whichever test comes next
