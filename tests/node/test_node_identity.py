"""The folder of files that are an agent's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleetplane.kernel.errors import SettingsError
from fleetplane.node.identity import PrivateFolder


@pytest.fixture
def folder(tmp_path: Path) -> PrivateFolder:
    made = PrivateFolder(tmp_path / "deep" / "state")
    made.make()
    return made


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_and_its_files_are_the_owners_alone(folder: PrivateFolder) -> None:
    assert mode(folder.root) == 0o700
    folder.root.chmod(0o755)
    folder.make()
    assert mode(folder.root) == 0o700
    umask = os.umask(0)
    try:
        folder.write(folder.root / "key", b"secret")
    finally:
        os.umask(umask)
    assert mode(folder.root / "key") == 0o600
    assert folder.read(folder.root / "key") == b"secret"
    assert folder.read(folder.root / "absent") is None


def test_a_mode_that_was_chosen_counts_for_every_file(tmp_path: Path) -> None:
    PrivateFolder(tmp_path, mode=0o640).write(tmp_path / "file", b"")
    assert mode(tmp_path / "file") == 0o640


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SettingsError, match=f"{tmp_path}/file cannot be used"):
        PrivateFolder(tmp_path / "file").make()
    with pytest.raises(SettingsError, match=f"{tmp_path} cannot be read"):
        PrivateFolder(tmp_path).read(tmp_path)


def test_removing_tells_what_there_was(folder: PrivateFolder) -> None:
    folder.write(folder.root / "a", b"")
    assert folder.remove(folder.root / "a", folder.root / "b") == [folder.root / "a"]
    assert list(folder.root.iterdir()) == []


def test_files_that_were_too_open_are_tightened(folder: PrivateFolder) -> None:
    places = [folder.root / name for name in ("open", "closed", "absent")]
    for place, bits in zip(places[:2], (0o644, 0o600), strict=True):
        place.write_bytes(b"")
        place.chmod(bits)
    assert folder.tighten(places) == [places[0]]
    assert mode(places[0]) == 0o600


def test_what_a_link_leads_to_is_left_alone(folder: PrivateFolder, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"somebody else's")
    outside.chmod(0o644)
    (folder.root / "key").symlink_to(outside)
    assert folder.tighten([folder.root / "key"]) == []
    assert mode(outside) == 0o644
