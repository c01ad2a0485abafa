"""`fleetplane audit verify`, on databases that are whole, edited, damaged and absent."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from cli_runner import Invoke
from server_process import running_server


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    with running_server(tmp_path / "data", "--only", "gpus") as server:
        assert server.stop() == 0
    return tmp_path / "data"


def test_a_chain_is_verified_edited_and_found_out(invoke: Invoke, data_dir: Path) -> None:
    whole = invoke("audit", "verify", "--data-dir", str(data_dir))
    assert (whole.code, whole.out) == (0, "intact: 1 entries, up to revision 0\n")

    with closing(sqlite3.connect(data_dir / "fleetplane.db")) as database, database:
        database.execute("INSERT INTO resources VALUES ('gpu', 's', ?, 1, x'00')", ("evil\n\x1b[2J",))
    edited = invoke("audit", "verify", "--data-dir", str(data_dir))
    assert edited.code == 3
    assert edited.out.startswith("not intact: resource gpu s evil")
    assert edited.out.count("\n") == 1
    assert "\x1b" not in edited.out


def test_a_file_that_is_damaged_or_absent_is_told_in_one_line(invoke: Invoke, data_dir: Path) -> None:
    (data_dir / "fleetplane.db").write_bytes(b"garbage" * 1000)
    damaged = invoke("audit", "verify", "--data-dir", str(data_dir))
    assert (damaged.code, damaged.out, damaged.err.count("\n")) == (1, "", 1)
    assert "is damaged" in damaged.err

    absent = invoke("audit", "verify", "--data-dir", str(data_dir / "nowhere"))
    assert (absent.code, absent.out, absent.err.count("\n")) == (4, "", 1)
