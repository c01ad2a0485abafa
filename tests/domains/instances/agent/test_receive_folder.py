"""Patches on disk: whole or not at all, whatever happens in between."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetplane.domains.instances.agent.files import folder as receive_folder
from fleetplane.domains.instances.agent.files.folder import PatchRefused, ReceiveFolder
from fleetplane.domains.instances.agent.files.patch import FilePatch
from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.machine import MachineSampler
from fleetplane.domains.instances.agent.reporter import InstanceReporter
from fleetplane.kernel import files
from fleetplane.kernel.clock import SystemClock

OLD = {"a.env": b"A=old", "b.env": b"B=old"}
NEW = {"a.env": b"A=new", "b.env": b"B=new", "c.env": b"C=new"}


class PowerCut(BaseException):
    """The process ends here."""


class Place:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.hashes = ["h-old"]
        self.folder = self.reopen()
        for name, content in OLD.items():
            (path / name).write_bytes(content)

    def reopen(self) -> ReceiveFolder:
        """The folder as the next process sees it."""
        self.folder = ReceiveFolder(
            self.path, mode=0o640, store_hash=self.hashes.append, now_ms=lambda: 1234567890123
        )
        return self.folder

    @property
    def files(self) -> dict[str, bytes]:
        return {name: (self.path / name).read_bytes() for name in self.folder.modified_ns()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_patch_adds_and_replaces_but_never_removes(place: Place) -> None:
    (place.path / "kept.json").write_text("{}")
    place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    assert place.files == NEW | {"kept.json": b"{}"}
    assert place.hashes[-1] == "h-new"
    assert (place.path / "write-files.last").read_text() == "1234567890123"


TOUCHES = (
    (receive_folder, "write_synced"),
    (receive_folder, "sync_folder"),
    (receive_folder, "write_durably"),
    (Path, "replace"),
    (Path, "rename"),
    (Path, "mkdir"),
    (shutil, "rmtree"),
)
"""Every way in which applying a patch touches the disk."""


class Fuse:
    """Lets so many touches of the disk through, and then none."""

    def __init__(self, left: int) -> None:
        self.left = left

    def guard(self, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self.left:
                raise PowerCut
            self.left -= 1
            return original(*arguments, **options)

        return call


def apply_until_cut(place: Place, touches: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the patch was finished before the power went."""
    fuse = Fuse(touches)
    with monkeypatch.context() as patched:
        for owner, name in TOUCHES:
            patched.setattr(owner, name, fuse.guard(getattr(owner, name)))
        try:
            place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
        except PowerCut:
            return False
    return True


def test_a_cut_anywhere_leaves_all_old_or_after_a_start_all_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for cut in range(200):
        folder = tmp_path / str(cut)
        folder.mkdir()
        place = Place(folder)
        finished = apply_until_cut(place, cut, monkeypatch)
        place.reopen().recover()
        new = place.files == NEW and place.hashes[-1] == "h-new"
        old = place.files == OLD and place.hashes[-1] == "h-old"
        assert old or new, f"cut at touch {cut}: {place.files} {place.hashes}"
        assert not list(folder.glob(".*"))
        taken.append(new)
        if finished:
            break
    assert len(taken) > 10
    assert taken == sorted(taken), "once committed, it stays committed"
    assert not taken[0]
    assert taken[-1]


def test_a_full_disk_leaves_every_file_as_it_was_and_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes, *, mode: int) -> None:
        if path.name == "c.env":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        files.write_synced(path, content, mode=mode)

    monkeypatch.setattr(receive_folder, "write_synced", full)
    with pytest.raises(OSError, match="No space left"):
        place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    assert place.files == OLD
    assert place.hashes == ["h-old"]
    assert "No space left" in place.folder.errors()["a.env"]
    assert not (place.path / ".staged").exists()
    monkeypatch.undo()
    place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    assert place.files == NEW
    assert place.folder.errors() == {}


def test_a_report_that_is_made_while_a_patch_is_applied_or_files_are_removed_lists_what_is_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.path / "c.env").mkdir()
    with pytest.raises(PatchRefused):
        place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    assert list(place.folder.errors()) == ["c.env"]
    (place.path / "c.env").rmdir()

    def names_then_a_patch(path: Path) -> list[str]:
        names = os.listdir(path)  # noqa: PTH208  # as what is tested does
        place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
        return names

    @contextmanager
    def entries_then_a_removal(path: Path) -> Iterator[list[os.DirEntry[str]]]:
        with os.scandir(path) as entries:
            found = list(entries)
        (path / "b.env").unlink()
        yield found

    calls = SimpleNamespace(listdir=names_then_a_patch, scandir=entries_then_a_removal)
    monkeypatch.setattr(receive_folder, "os", calls)
    assert place.folder.errors() == {}
    assert set(place.folder.modified_ns()) == {"a.env", "c.env"}


async def test_a_report_names_no_hash_whose_files_it_does_not_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = IdentityFolder(tmp_path / "identity", mode=0o600)
    identity.root.mkdir()
    identity.store_config_hash("h-old")
    (tmp_path / "recv").mkdir()
    received = ReceiveFolder(
        tmp_path / "recv", mode=0o640, store_hash=identity.store_config_hash, now_ms=lambda: 1
    )
    with pytest.raises(PatchRefused):
        received.apply(FilePatch(files={"a.json": b"{"}, config_hash="h-bad"))
    errors = received.errors

    def errors_then_a_patch() -> dict[str, str]:
        found = errors()
        received.apply(FilePatch(files={"a.json": b"{}"}, config_hash="h-new"))
        return found

    monkeypatch.setattr(received, "errors", errors_then_a_patch)
    reporter = InstanceReporter(
        version="1",
        instance_id="i",
        interval_seconds=1.0,
        machine=MachineSampler(root=tmp_path),
        identity=identity,
        received=received,
        clock=SystemClock(),
    )
    early = await reporter.compose()
    assert (early.files["a.json"].error != "", early.config_hash) == (True, "h-old")
    monkeypatch.undo()
    late = await reporter.compose()
    assert (late.files["a.json"].error, late.config_hash) == ("", "h-new")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_a_write_that_the_device_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb", buffering=0) as device:
        device.write(b"x")
    (tmp_path / "link").symlink_to("/dev/full")
    with pytest.raises(OSError, match="symbolic link"):
        files.write_synced(tmp_path / "link", b"x", mode=0o600)


def test_a_folder_in_the_way_refuses_the_patch(place: Place) -> None:
    (place.path / "c.env").mkdir()
    with pytest.raises(PatchRefused, match="in the way"):
        place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    assert place.files == OLD


def test_a_symbolic_link_is_replaced_and_not_followed(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("untouched")
    (place.path / "c.env").symlink_to(outside)
    place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    assert outside.read_text() == "untouched"
    assert (place.path / "c.env").read_bytes() == b"C=new"


def test_modes_do_not_depend_on_the_umask(place: Place) -> None:
    before = os.umask(0o077)
    try:
        place.folder.apply(FilePatch(files=NEW, config_hash="h-new"))
    finally:
        os.umask(before)
    assert {(place.path / name).stat().st_mode & 0o777 for name in NEW} == {0o640}
