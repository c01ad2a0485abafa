"""`fleetplane store`, `audit public-key` and `audit verify --anchor`, as their owner uses them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support.shared.cli_runner import Invoke
from support.shared.storekit import KINDS, put

from fleetplane import settings as configuration
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.sections.process import AuditSection
from fleetplane.server.audit_keeper import AuditKeeper, anchors
from fleetplane.server.offline import MasterKeys

CLOCK = SystemClock()


def write(data: Path, *names: str) -> None:
    """What a server does to its data directory, in short."""
    settings = configuration.load(config=None, flags={"data_dir": str(data)})
    keys, wanted = MasterKeys(settings, CLOCK), StoreSettings(path=data / "fleetplane.db")

    async def work() -> None:
        key = keys.audit
        async with Store.open(
            wanted, kinds=KINDS, clock=CLOCK, audit_key=lambda is_new: key(may_create=is_new)
        ) as store:
            for name in names:
                await put(store, name)
            folder = data / "audit"
            folder.mkdir(exist_ok=True)
            section = AuditSection()
            await AuditKeeper(
                store,
                keys.checkpoints(),
                CLOCK,
                section,
                directory=folder,
                anchors=anchors(section, folder, None),
            ).checkpoint()

    asyncio.run(work())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir(mode=0o700)
    write(made, "a", "b")
    return made


def test_a_loss_is_accepted_in_so_many_words_and_only_where_there_is_one(invoke: Invoke, data: Path) -> None:
    nothing = invoke("store", "accept-loss", "--yes", "--data-dir", str(data))
    assert (nothing.code, nothing.out) == (4, "")
    assert "has lost nothing" in nothing.err

    shutil.copy(data / "fleetplane.db", data / "older.db")
    write(data, "c", "d")
    shutil.copytree(data / "audit", data / "elsewhere")
    (data / "older.db").rename(data / "fleetplane.db")
    done = invoke("store", "accept-loss", "--yes", "--data-dir", str(data))
    assert (done.code, done.out) == (0, "accepted: revisions after 2 up to 4 are lost\n")
    write(data, "e")

    # Checkpoints of what was given up are told, not taken for a fault.
    verified = invoke(
        "audit", "verify", "--data-dir", str(data), "--anchor", str(data / "elsewhere" / "checkpoints.jsonl")
    )
    assert verified.code == 0
    assert "note: entry 4 of lineage" in verified.err
    assert verified.out.startswith("intact: 4 entries")


def test_a_stranger_s_checkpoint_and_a_missing_key_are_told_in_one_line(
    invoke: Invoke, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    write(other, "x")
    foreign = invoke("audit", "verify", "--data-dir", str(data), "--anchor", str(other / "audit"))
    assert (foreign.code, foreign.out, foreign.err.count("\n")) == (2, "", 1)
    assert "was not signed by this server's key" in foreign.err

    shown = invoke("audit", "public-key", "--data-dir", str(data))
    assert len(bytes.fromhex(shown.out.strip())) == 32
    assert shown.out.strip() in (data / "audit" / "checkpoints.jsonl").read_text()

    (data / "master.key").unlink()
    missing = invoke("audit", "verify", "--data-dir", str(data))
    assert (missing.code, missing.out, missing.err.count("\n")) == (1, "", 1)
    assert "master key" in missing.err
    assert not (data / "master.key").exists()
