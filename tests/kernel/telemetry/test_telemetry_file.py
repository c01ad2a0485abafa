"""Telemetry in a file: whose file it is, and what happens when there is no room on the disk."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from support.shared.telemetry_place import TelemetryPlace, asked, bodies, line

from fleetplane.kernel.errors import IntegrityError, Unavailable
from fleetplane.kernel.telemetry.sqlite import engine as reading_module
from fleetplane.kernel.telemetry.sqlite.engine import SqliteTelemetry


async def test_a_question_that_takes_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with TelemetryPlace(path=tmp_path / "telemetry.db").opened() as telemetry:
        telemetry.offer(lines=[line(number) for number in range(5_000)])
        await telemetry.flush()
        monkeypatch.setattr(reading_module, "PATIENCE_SECONDS", -1.0)
        with pytest.raises(Unavailable, match="too long"):
            await telemetry.lines(asked())
        monkeypatch.undo()
        assert len(await bodies(telemetry)) == 100


async def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE mine (x)")
    other.close()
    with pytest.raises(IntegrityError, match="something else"):
        async with TelemetryPlace(path=tmp_path / "telemetry.db").opened():
            pass
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(IntegrityError, match="damaged"):
        async with TelemetryPlace(path=tmp_path / "telemetry.db").opened():
            pass


async def test_a_full_disk_costs_the_batch_and_nothing_else(tmp_path: Path) -> None:
    async with TelemetryPlace(path=tmp_path / "telemetry.db").opened() as telemetry:
        telemetry.offer(lines=[line(1)])
        await telemetry.flush()
        assert isinstance(telemetry._engine, SqliteTelemetry)
        held = telemetry._engine.writer._connection
        held.execute("PRAGMA max_page_count = 20")  # SQLite then says what it says of a full disk
        telemetry.offer(lines=[line(n, body=b"x" * 50_000) for n in range(10, 14)])
        await telemetry.flush()
        assert telemetry.statistics().lost == 4
        assert await bodies(telemetry) == [1]
        held.execute("PRAGMA max_page_count = 100000")
        telemetry.offer(lines=[line(2, at=1)])
        assert await bodies(telemetry) == [2, 1]
