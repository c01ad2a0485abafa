"""A full disk: writes fail clearly, reads go on, and space brings writes back."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.shared import full_disk_writer
from support.shared.storekit import SCOPE, THING, asked, audit_of, opened, put

from fleetplane.kernel.audit.archive import verify_file
from fleetplane.kernel.errors import StorageFull, Unavailable


def test_a_full_disk_fails_writes_clearly_and_recovers_by_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, full_disk_writer.__file__, tmp_path / "store.db"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    steps = [line.split()[0] for line in done.stdout.splitlines()]
    assert steps == ["full", "reads", "recovered", "reopened"]
    assert done.stdout.splitlines()[0] == "full STORAGE_FULL 503 8"
    assert asyncio.run(verify_file(tmp_path / "store.db")).intact


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, where the machine lets us make one."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


async def test_a_small_file_system_that_fills_up_recovers_when_space_returns(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1024 * 1024))
    async with opened(small_disk / "store.db") as store:

        async def fill() -> None:
            for number in range(500):
                await put(store, f"n{number}", padding="x" * 16_000)

        with pytest.raises(StorageFull):
            await fill()
        written = store.revision
        assert store.get(THING, SCOPE, "n0") is not None
        assert len(store.list(THING)) == written
        ballast.unlink()
        assert (await put(store, "after")).revision == written + 1
        assert (await audit_of(store)).intact


async def test_a_database_that_cannot_be_written_is_unavailable_and_readable(tmp_path: Path) -> None:
    async with opened(tmp_path / "store.db") as store:
        await put(store, "x", 1)
        await asked(store, "PRAGMA query_only = ON")
        with pytest.raises(Unavailable, match="readonly"):
            await put(store, "y")
        assert [thing.name for thing in store.list(THING)] == ["x"]
        await asked(store, "PRAGMA query_only = OFF")
        assert (await put(store, "y")).revision == 2
