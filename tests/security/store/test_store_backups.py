"""A backup, with the master key in it, made where other users of the machine may write too."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.shared.server_process import running_server

from fleetplane import backups
from fleetplane import settings as configuration
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists
from fleetplane.offline import DataDirectory


def place(data_dir: Path) -> DataDirectory:
    return DataDirectory(configuration.load(config=None, flags={"data_dir": str(data_dir)}), SystemClock())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("backups") / "data"
    with running_server(made, "--only", "gpus") as server:
        assert server.stop() == 0
    return made


def test_a_file_or_link_that_a_neighbour_made_first_gets_nothing_of_a_backup(
    tmp_path: Path, data: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    target, waiting, mine = shared / "backup.tar", shared / ".backup.tar.new", tmp_path / "mine"
    waiting.touch(mode=0o666)
    mine.hardlink_to(waiting)
    backups.make(place(data), target, backups.Contents(key=True))
    assert mine.read_bytes() == b""
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in shared.iterdir()) == [".backup.tar.new", "backup.tar"]
    target.unlink()
    target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlreadyExists):
        backups.make(place(data), target, backups.Contents(key=True))
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_comes_while_a_backup_is_made_is_not_replaced(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, read_back = tmp_path / "backup.tar", backups._read_back

    def slowly(packed: Path) -> None:
        read_back(packed)
        target.write_text("somebody's")

    monkeypatch.setattr(backups, "_read_back", slowly)
    with pytest.raises(AlreadyExists):
        backups.make(place(data), target, backups.Contents())
    assert target.read_text() == "somebody's"
    assert [path.name for path in tmp_path.iterdir()] == ["backup.tar"]
