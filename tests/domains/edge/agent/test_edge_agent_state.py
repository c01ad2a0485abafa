"""The state folder, the journal and the outbox: what is kept, how privately, and what a crash leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetplane.domains.edge.agent.commands import journal as journals
from fleetplane.domains.edge.agent.commands.journal import CommandJournal, ResultOutbox
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, new_key, public_bytes
from fleetplane.domains.edge.agent.status import forget, overview
from fleetplane.kernel.errors import FailedPrecondition, IntegrityError, Unavailable
from fleetplane.sim.clock import VirtualClock

NOW = datetime(2026, 5, 1, 12, 30, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    made = StateFolder(tmp_path / "state")
    made.make()
    return made


def modes(folder: StateFolder) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.root.rglob("*") if path.is_file()}


def test_everything_is_the_owners_alone(folder: StateFolder) -> None:
    folder.store_key(new_key())
    folder.store_token("a.b.c")
    folder.store_server_key(b"k" * 32)
    folder.store_document(b"{}")
    folder.store_next_key(key := new_key())
    folder.promote_next_key(key, now=NOW)
    assert folder.root.stat().st_mode & 0o777 == 0o700
    assert set(modes(folder).values()) == {0o600}


def test_files_that_are_too_open_are_closed(folder: StateFolder) -> None:
    folder.store_key(new_key())
    folder.key.chmod(0o644)
    folder.root.chmod(0o755)
    assert set(folder.tighten_all()) == {folder.root, folder.key}
    assert folder.key.stat().st_mode & 0o777 == 0o600


def test_a_key_is_32_bytes_and_its_public_half_lies_beside_it(folder: StateFolder) -> None:
    folder.store_key(key := new_key())
    assert len(folder.key.read_bytes()) == 32
    assert (folder.root / "node.pub").read_bytes() == public_bytes(key)
    assert (folder.root / "node.key.pub").read_bytes() == public_bytes(key)
    folder.key.write_bytes(b"short")
    with pytest.raises(IntegrityError, match="5 bytes"):
        folder.load_key()


def test_a_rotated_key_goes_to_the_archive_and_from_there_in_time(folder: StateFolder) -> None:
    folder.store_key(old := new_key())
    folder.store_next_key(key := new_key())
    kept = folder.promote_next_key(key, now=NOW)
    assert kept.name == "20260501T123000Z.key"
    assert kept.read_bytes() == old.private_bytes_raw()
    assert folder.load_key().private_bytes_raw() == key.private_bytes_raw()
    assert folder.load_next_key() is None
    os.utime(kept, (NOW.timestamp() - 7200, NOW.timestamp() - 7200))
    assert folder.prune_archive(keep_seconds=3600, now=NOW) >= 1
    assert not kept.exists()


HOLD = """
import sys
from pathlib import Path
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder
with StateFolder(Path(sys.argv[1])).alone():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_daemon_works_in_a_folder_and_the_next_is_told_which(folder: StateFolder) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Unavailable, match=str(holder.pid)), folder.alone():
            pass
        assert folder.daemon_pid() == holder.pid
        with pytest.raises(FailedPrecondition, match="daemon works"):
            forget(folder, purge=False, force=False)
    finally:
        holder.kill()
        holder.communicate(timeout=60)
    assert folder.daemon_pid() is None


def test_forgetting_keeps_the_key_unless_everything_is_to_go(folder: StateFolder) -> None:
    folder.store_key(new_key())
    folder.store_token("a.b.c")
    folder.store_document(b"{}")
    forget(folder, purge=False, force=False)
    assert folder.key.exists()
    assert not folder.token.exists()
    forget(folder, purge=True, force=False)
    assert not folder.key.exists()
    assert not folder.config.exists()


def test_an_overview_says_what_is_broken(folder: StateFolder) -> None:
    folder.key.write_bytes(b"x")
    folder.token.write_text("nonsense")
    found = overview(folder)
    assert found["enrolled"] is False
    assert "unusable" in str(found["key"])
    assert "unusable" in str(found["token"])


# The journal.


def opened(path: Path, now: float = 1000.0) -> CommandJournal:
    journal = CommandJournal(path)
    journal.open(now=now)
    return journal


def test_a_command_that_is_noted_while_another_is_delivered_is_not_forgotten_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go, replace = threading.Event(), threading.Event(), msgspec.structs.replace

    def slow(record: journals.JournalRecord, **changes: Any) -> journals.JournalRecord:
        held.set()
        assert go.wait(60)
        return replace(record, **changes)

    monkeypatch.setattr(journals, "REMEMBERED", 1)
    journal = opened(tmp_path / "commands.log")
    journal.ended("old", b"result", now=1000.0)
    monkeypatch.setattr(msgspec.structs, "replace", slow)
    delivering = threading.Thread(target=journal.delivered, args=("old",))
    noting = threading.Thread(target=journal.begun, args=("new",), kwargs={"now": 1001.0})
    delivering.start()
    assert held.wait(60)
    noting.start()
    noting.join(1.0)  # it is done by now, or waits for the delivery
    go.set()
    for thread in (delivering, noting):
        thread.join(60)
    journal.close()
    assert (journal.find("old"), journal.last) == (None, "new")
    assert repr(journal) == "<Journal 1 commands, 0 bytes of results>"


def test_what_was_begun_and_what_ended_survive_any_end(tmp_path: Path) -> None:
    path = tmp_path / "commands.log"
    journal = opened(path)
    journal.begun("a", now=1000)
    journal.begun("b", now=1001)
    journal.ended("b", b"\x00result", now=1002)
    again = opened(path)  # nothing was closed
    begun, ended = again.find("a"), again.find("b")
    assert begun is not None
    assert ended is not None
    assert (begun.result, ended.result, again.last) == (None, b"\x00result", "b")
    assert [record.id for record in again.undelivered()] == ["b"]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_cut_off_by_a_crash_costs_that_line_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "commands.log"
    journal = opened(path)
    journal.begun("a", now=1000)
    journal.begun("b", now=1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = opened(path)
    assert again.find("a") is not None or cut > len(whole) // 2
    again.begun("c", now=1001)
    assert opened(path).find("c") is not None


def test_old_commands_are_forgotten_and_results_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "RESULTS_LIMIT_BYTES", 1000)
    monkeypatch.setattr(journals, "REMEMBERED", 10)
    journal = opened(tmp_path / "commands.log")
    for number in range(20):
        journal.begun(str(number), now=1000 + number)
        journal.ended(str(number), b"x" * 300, now=1000 + number)
    assert journal.find("9") is None
    kept = [record for record in journal.undelivered() if record.result]
    assert sum(len(record.result or b"") for record in kept) <= 1000
    answered = journal.find("10")
    assert answered is not None
    assert answered.result == b""  # that it was answered stays known
    assert opened(tmp_path / "commands.log", now=1000 + journals.KEEP_SECONDS * 2).last == ""


def test_a_full_file_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "FILE_LIMIT_BYTES", 2000)
    monkeypatch.setattr(journals, "REMEMBERED", 5)
    journal = opened(tmp_path / "commands.log")
    for number in range(200):
        journal.begun(str(number), now=1000)
    assert (tmp_path / "commands.log").stat().st_size <= 2000
    assert opened(tmp_path / "commands.log").last == "199"


# The outbox.


class NoCarrier:
    async def send_progress(self, command_id: str, chunk: bytes) -> None: ...


async def test_a_result_goes_out_on_every_stream_until_one_has_outlived_it(tmp_path: Path) -> None:
    clock, journal = VirtualClock(), opened(tmp_path / "commands.log")
    outbox = ResultOutbox(journal, clock, settled_seconds=30)
    journal.ended("a", b"r", now=1000)
    outbox.result("a", b"r")
    for _ in range(2):
        outbox.attach(NoCarrier())
        ((command_id, result),) = outbox.unsent()
        outbox.went_out(command_id, result)
        assert outbox.unsent() == []
        await clock.advance(29)
        outbox.settle()
    await clock.advance(2)
    outbox.settle()
    outbox.attach(NoCarrier())
    assert outbox.unsent() == []
    assert journal.undelivered() == []
