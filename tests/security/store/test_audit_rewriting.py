"""Somebody with the database, and then also with its keys, writes another past."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Event, Thread

import msgspec
import pytest
from support.shared.storekit import KINDS, put

from fleetplane.kernel.audit import chain as audit
from fleetplane.kernel.audit import checkpoints as audit_checkpoints
from fleetplane.kernel.audit.archive import Means, verify_file
from fleetplane.kernel.audit.chain import ChainVerdict
from fleetplane.kernel.audit.checkpoints import Checkpoint, CheckpointSigner, FileAnchor
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.errors import IntegrityError, SettingsError
from fleetplane.kernel.objects import LocalObjects
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sections.process import AuditSection
from fleetplane.server import audit_keeper
from fleetplane.server.audit_keeper import CHECKPOINTS, AuditKeeper, anchors
from fleetplane.sim.clock import VirtualClock

KEY = hashlib.sha256(b"chain").digest()
LAST = "WHERE number = (SELECT max(number) FROM groups)"
SIGNER = CheckpointSigner(hashlib.sha256(b"checkpoints").digest())


@asynccontextmanager
async def opened(path: Path, clock: Clock | None = None) -> AsyncIterator[Store]:
    settings = StoreSettings(path=path)
    clock = clock or SystemClock()
    async with Store.open(settings, kinds=KINDS, clock=clock, audit_key=lambda _: KEY) as store:
        yield store


def keeper(store: Store, directory: Path, clock: Clock | None = None, **section: object) -> AuditKeeper:
    wanted = AuditSection(**section)  # type: ignore[arg-type]
    directory.mkdir(exist_ok=True)
    return AuditKeeper(
        store,
        SIGNER,
        clock or SystemClock(),
        wanted,
        directory=directory,
        anchors=anchors(wanted, directory, LocalObjects(directory / "objects")),
    )


def kept(path: Path) -> list[Checkpoint]:
    return list(audit_checkpoints.read_all(path.read_bytes().splitlines(), SIGNER.public))


async def checked(path: Path, **means: object) -> ChainVerdict:
    wanted = {"key": KEY, "public": SIGNER.public, "archives": path.parent / "audit", **means}
    return await verify_file(path, means=Means(**wanted))  # type: ignore[arg-type]


async def filled(tmp_path: Path, count: int = 5) -> Path:
    path = tmp_path / "store.db"
    async with opened(path) as store:
        for number in range(count):
            await put(store, f"n{number}", number)
        await store.put_secret("password", b"sealed")
        await keeper(store, tmp_path / "audit").checkpoint()
    return path


def rewrite(path: Path, key: bytes, *, actor: str = "mallory", cut: int | None = None) -> None:
    """Write another actor into every entry, and make the chain anew, as well as one can."""
    with closing(sqlite3.connect(path)) as database, database:
        rows = database.execute("SELECT seq, entry FROM audit ORDER BY seq").fetchall()
        previous = audit.GENESIS
        for seq, entry in rows[:cut]:
            found = msgspec.structs.replace(msgspec.json.decode(entry, type=audit.ChainEntry), actor=actor)
            row = audit.append(previous, found, key)
            previous = row.hash
            database.execute("UPDATE audit SET hash = ?, entry = ? WHERE seq = ?", (row.hash, row.entry, seq))
        if cut is not None:
            database.execute("DELETE FROM audit WHERE seq > ?", (cut,))
            revision = msgspec.json.decode(rows[cut - 1][1], type=audit.ChainEntry).revision
            database.execute(f"UPDATE groups SET revision = ?, audit_seq = ? {LAST}", (revision, cut))
        database.execute(f"UPDATE groups SET audit_hash = ? {LAST}", (previous,))


async def test_a_whole_log_is_intact_with_and_without_checkpoints(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    assert (await checked(path)).intact
    anchors = kept(tmp_path / "audit" / CHECKPOINTS)
    assert anchors[-1].seq == 6
    assert (await checked(path, anchors=anchors)).intact


async def test_actors_rewritten_and_the_chain_rehashed_without_the_key_are_found(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    rewrite(path, b"")
    verdict = await checked(path)
    assert not verdict.intact
    with pytest.raises(IntegrityError, match="another audit entry"):  # by the mark beside it
        async with opened(path):
            pass
    # Without its mark it passes for a log from before there were keys: taken, and told for what it is.
    (tmp_path / "store.db.mark").unlink()
    async with opened(path) as store:
        await put(store, "x")
    verdict = await checked(path)
    assert "entries 1 to 6 are from before the log had a key" in verdict.notes[0]
    assert not (await checked(path, anchors=kept(tmp_path / "audit" / CHECKPOINTS))).intact


async def test_a_chain_rehashed_with_a_guessed_key_is_found(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    rewrite(path, b"guessed" * 4)
    verdict = await checked(path)
    assert (verdict.intact, verdict.broken_seq) == (False, 1)


async def test_a_past_rewritten_with_the_key_is_found_by_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    anchors = kept(tmp_path / "audit" / CHECKPOINTS)
    rewrite(path, KEY)
    assert (await checked(path)).intact, "whoever has the key can write another chain"
    verdict = await checked(path, anchors=anchors)
    assert not verdict.intact
    assert "not the one that a checkpoint tells of" in verdict.problem


async def test_a_past_cut_off_with_the_key_is_found_by_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    anchors = kept(tmp_path / "audit" / CHECKPOINTS)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DELETE FROM resources WHERE name = 'n4'")
        database.execute("DELETE FROM secrets")
    rewrite(path, KEY, actor="tester", cut=4)
    assert (await checked(path)).intact
    verdict = await checked(path, anchors=anchors)
    assert not verdict.intact
    assert "a checkpoint tells of entry 6" in verdict.problem


async def test_another_database_in_its_place_is_found_by_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    anchors = kept(tmp_path / "audit" / CHECKPOINTS)
    (tmp_path / "other").mkdir()
    other = await filled(tmp_path / "other", 9)
    assert (await checked(other)).intact
    verdict = await checked(other, anchors=anchors)
    assert "which is not this log's" in verdict.problem
    assert (await checked(path, anchors=anchors)).intact


async def test_a_secret_exchanged_for_another_is_found(tmp_path: Path) -> None:
    path = await filled(tmp_path)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE secrets SET blob = x'00' WHERE name = 'password'")
    verdict = await checked(path)
    assert verdict.problem == "secret password is not what was last written"


def test_a_forged_or_altered_checkpoint_is_refused() -> None:
    head = audit.Head(revision=1, seq=7, hash=b"\1" * 32)
    line = SIGNER.sign("lineage", head, 0)
    assert audit_checkpoints.read(line, SIGNER.public).seq == 7
    stranger = CheckpointSigner(b"\2" * 32).sign("lineage", head, 0)
    for forged in (line.replace(b'"seq":7', b'"seq":8'), stranger, b"{}", b"\xff", b"", line[:-9]):
        with pytest.raises(IntegrityError):
            audit_checkpoints.read(forged, SIGNER.public)


# Chains that are older than keys.


async def test_a_chain_that_began_without_a_key_comes_under_it(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with Store.open(StoreSettings(path=path), kinds=KINDS, clock=SystemClock()) as store:
        await put(store, "old", 1)
        await store.put_secret("password", b"sealed")
    with closing(sqlite3.connect(path)) as database, database:  # as the former version wrote it
        (entry,) = database.execute("SELECT entry FROM audit WHERE seq = 2").fetchone()
        old = msgspec.json.decode(entry, type=audit.ChainEntry)
        bare = msgspec.structs.replace(
            old, changes=(audit.AuditedChange("secret.put", "", "", "password", ""),)
        )
        (first,) = database.execute("SELECT hash FROM audit WHERE seq = 1").fetchone()
        row = audit.append(first, bare)
        database.execute("UPDATE audit SET hash = ?, entry = ? WHERE seq = 2", (row.hash, row.entry))
        database.execute(f"UPDATE groups SET audit_hash = ? {LAST}", (row.hash,))
    (tmp_path / "store.db.mark").unlink()
    assert (await checked(path)).problem == "no entry of the chain is under this master key"
    async with opened(path) as store:
        await put(store, "new", 2)
    assert (await checked(path)).intact
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE secrets SET blob = x'00'")
    assert "secret password" in (await checked(path)).problem
    rewrite(path, b"")  # and the old part cannot be written anew either
    assert not (await checked(path)).intact


# Archives.


async def archived(tmp_path: Path, clock: VirtualClock) -> Path:
    """A log of which the first 20 entries are in archives."""
    path = tmp_path / "store.db"
    async with opened(path, clock) as store:
        made = keeper(store, tmp_path / "audit", clock, keep_days=1)
        for number in range(20):
            await put(store, f"old{number}", number)
        await made.checkpoint()
        await clock.advance(3 * 86_400)
        for number in range(1100):
            await put(store, f"new{number % 10}", number)
        assert await made.archive() == 20
        assert await made.archive() == 0
        await made.checkpoint()
        assert min([row.seq async for row in store.audit()]) == 21
    return path


async def test_old_entries_are_archived_and_verification_goes_on_across_the_cut(
    tmp_path: Path, virtual: VirtualClock
) -> None:
    path = await archived(tmp_path, virtual)
    anchors = kept(tmp_path / "audit" / CHECKPOINTS)
    assert [one.seq for one in anchors] == [20, 1121]
    verdict = await checked(path, anchors=anchors)
    assert (verdict.intact, verdict.entries) == (True, 1121)
    async with opened(path, virtual) as store:  # and it can be opened, and written on
        await put(store, "after", 1)
    assert (await checked(path, anchors=anchors)).intact


async def test_archiving_by_number_comes_to_an_end(tmp_path: Path) -> None:
    """Every archive is an entry of the log, too."""
    async with opened(tmp_path / "store.db") as store:
        made = keeper(store, tmp_path / "audit", keep_entries=1000)
        for start in range(0, 1500, 100):
            await asyncio.gather(*(put(store, f"n{n}", n) for n in range(start, start + 100)))
        assert await made.archive() == 500
        assert await made.archive() == 0
    assert (await checked(tmp_path / "store.db")).intact


async def test_what_is_sealed_with_an_entry_goes_with_it(tmp_path: Path, virtual: VirtualClock) -> None:
    """Old and new values of proxies; other secrets stay, however old."""
    async with opened(tmp_path / "store.db", virtual) as store:
        made = keeper(store, tmp_path / "audit", virtual, keep_days=1)
        await store.put_secret("proxies/audit/1", b"sealed")
        await store.put_secret("authority", b"sealed")
        await virtual.advance(3 * 86_400)
        await store.put_secret("proxies/audit/2", b"sealed")
        for number in range(1100):
            await put(store, "x", number)
        assert await made.archive() == 2
        assert list(await store.secret_names("")) == ["authority", "proxies/audit/2"]
    assert (await checked(tmp_path / "store.db")).intact


async def test_archives_that_are_missing_are_told_and_may_be_elsewhere(
    tmp_path: Path, virtual: VirtualClock
) -> None:
    path = await archived(tmp_path, virtual)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (file,) = (tmp_path / "audit").glob("*.gz")
    file.rename(elsewhere / file.name)
    verdict = await checked(path)
    assert not verdict.intact
    assert "entries 1 to 20 were archived" in verdict.problem
    assert (await checked(path, archives=elsewhere)).intact
    verdict = await checked(path, archives_are_elsewhere=True)
    assert verdict.intact
    assert "entries 1 to 20 were not checked" in verdict.notes[0]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE resources SET body = x'00' WHERE name = 'new3'")
    assert "new3" in (await checked(path, archives_are_elsewhere=True)).problem


@pytest.mark.parametrize("damage", ["entry", "forged cut", "later cut"])
async def test_an_archive_or_a_cut_that_was_tampered_with_is_found(
    tmp_path: Path, virtual: VirtualClock, damage: str
) -> None:
    import gzip

    path = await archived(tmp_path, virtual)
    (file,) = (tmp_path / "audit").glob("*.gz")
    if damage == "entry":
        file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()).replace(b"tester", b"tinker", 1)))
        verdict = await checked(path)
        assert (verdict.intact, verdict.broken_seq) == (False, 1)
        return
    file.unlink()
    with closing(sqlite3.connect(path)) as database, database:
        (cut,) = database.execute("SELECT audit_cut FROM meta").fetchone()
        if damage == "forged cut":
            database.execute("UPDATE meta SET audit_cut = ?", (cut.replace('"seq":20', '"seq":21'),))
            database.execute("DELETE FROM audit WHERE seq = 21")
        else:
            database.execute("DELETE FROM audit WHERE seq < 100")
    if damage == "forged cut":
        with pytest.raises(IntegrityError, match="not signed"):
            await checked(path, archives_are_elsewhere=True)
    else:
        assert "was archived up to entry 20" in (await checked(path, archives_are_elsewhere=True)).problem


async def test_nothing_is_lost_when_the_server_dies_between_archive_and_cut(
    tmp_path: Path, virtual: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store.db"
    async with opened(path, virtual) as store:
        made = keeper(store, tmp_path / "audit", virtual, keep_days=1)
        for number in range(5):
            await put(store, f"old{number}", number)
        await virtual.advance(3 * 86_400)
        for number in range(1100):
            await put(store, "new", number)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "cut_audit", _dying)
            with pytest.raises(KeyboardInterrupt):
                await made.archive()
        assert (await checked(path)).intact
        assert await made.archive() == 5
    verdict = await checked(path)
    assert (verdict.intact, verdict.entries) == (True, 1106)


async def _dying(*_: object) -> None:
    raise KeyboardInterrupt


# Where checkpoints go.


async def test_checkpoints_reach_files_syslog_objects_and_webhooks(tmp_path: Path) -> None:
    received: list[bytes] = []
    read_to_the_end: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # far more than anybody who is not reading lets through
                for _ in range(1024):
                    self.wfile.write(bytes(65_536))
                read_to_the_end.append(self.path)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as hook, socket.socket(type=socket.SOCK_DGRAM) as syslog:
        Thread(target=hook.serve_forever, daemon=True).start()
        syslog.bind(("127.0.0.1", 0))
        syslog.settimeout(60)
        places = (
            f"file:{tmp_path}/elsewhere.jsonl",
            f"syslog:127.0.0.1:{syslog.getsockname()[1]}",
            "objects:",
            f"http://127.0.0.1:{hook.server_port}/hook?token=secret",
        )
        async with opened(tmp_path / "store.db") as store:
            await put(store, "x")
            made = keeper(store, tmp_path / "audit", anchors=places)
            await made.checkpoint()
            await made.checkpoint()  # nothing new: nothing is sent
            lineage = store.lineage
            text = str([*made.collect()])
        hook.shutdown()
        line = (tmp_path / "elsewhere.jsonl").read_bytes().strip()
        assert audit_checkpoints.read(line, SIGNER.public).seq == 1
        assert received == [line]
        assert read_to_the_end == [], "what it answers is nothing that we ask for, and may have no end"
        assert syslog.recv(4096) == b"<109>fleetplane-audit: " + line
        stored = await LocalObjects(tmp_path / "audit" / "objects").get(f"audit/{lineage}/{1:012d}.json")
        assert stored is not None
        assert stored.body.strip() == line
    assert "secret" not in text, "an address may have one"


async def test_a_place_that_fails_is_told_and_tried_again_with_the_next(tmp_path: Path) -> None:
    missing = tmp_path / "not mounted" / "anchors.jsonl"
    async with opened(tmp_path / "store.db") as store:
        await put(store, "x")
        made = keeper(store, tmp_path / "audit", anchors=(f"file:{missing}",))
        await made.checkpoint()
        assert made._failures[FileAnchor(missing).name] == 1
        missing.parent.mkdir()
        await made.checkpoint()
        assert [one.seq for one in kept(missing)] == [1]


async def test_a_last_checkpoint_is_made_when_the_server_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_keeper, "LAST_SECONDS", 60.0)
    async with opened(tmp_path / "store.db") as store:
        task = asyncio.create_task(keeper(store, tmp_path / "audit").run())
        await asyncio.sleep(0)
        await put(store, "x")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert kept(tmp_path / "audit" / CHECKPOINTS)[-1].seq == 1


class DirectFile:
    """A file that is appended to without a thread."""

    name = "direct"

    def __init__(self, path: Path) -> None:
        self._path = path

    async def send(self, _checkpoint: Checkpoint, line: bytes, /) -> None:
        with self._path.open("ab") as file:
            file.write(line + b"\n")


async def test_a_file_that_is_being_shortened_when_the_server_ends_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go, read_bytes = Event(), Event(), Path.read_bytes
    file = tmp_path / CHECKPOINTS

    def held(path: Path) -> bytes:
        found = read_bytes(path)
        if path == file:
            begun.set()
            assert go.wait(60)
        return found

    monkeypatch.setattr(audit_keeper, "LAST_SECONDS", 60.0)
    async with opened(tmp_path / "store.db") as store:
        await put(store, "x")
        with monkeypatch.context() as slow:
            slow.setattr(audit_keeper, "CHECKPOINTS_LIMIT_BYTES", 0)
            slow.setattr(Path, "read_bytes", held)
            keeping = AuditKeeper(
                store, SIGNER, SystemClock(), AuditSection(), directory=tmp_path, anchors=[DirectFile(file)]
            )
            task = asyncio.create_task(keeping.run())
            async with asyncio.timeout(60):
                while not begun.is_set():
                    await asyncio.sleep(0.005)
        await put(store, "y")
        task.cancel()
        for _ in range(20):
            await asyncio.sleep(0)  # it would have written its last one by now
        go.set()
        await asyncio.gather(task, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert kept(file)[-1].seq == 2


@pytest.mark.parametrize(
    "place",
    ["ftp://x", "file:relative", "http://elsewhere.example/x", "/path", "syslog:host", "syslog:h:70000"],
)
def test_a_place_that_cannot_be_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        anchors(AuditSection(anchors=(place,)), tmp_path, None)


@pytest.fixture
def virtual() -> VirtualClock:
    return VirtualClock()


async def test_a_place_in_the_data_directory_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "audit").touch()  # in the way of the folder
    async with opened(tmp_path / "store.db") as store:
        await put(store, "x")
        made = AuditKeeper(
            store,
            SIGNER,
            SystemClock(),
            AuditSection(),
            directory=tmp_path / "audit",
            anchors=anchors(AuditSection(), tmp_path / "audit", None),
        )
        await made.checkpoint()
        await made.checkpoint()
        assert sum(made._failures.values()) == 2
