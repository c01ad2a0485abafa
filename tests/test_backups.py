"""Backups: of a running server, checked; and the way back, as a new lineage."""

from __future__ import annotations

import io
import os
import sqlite3
import tarfile
import threading
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from support.shared.cli_runner import execute
from support.shared.server_process import running_server

from fleetplane import settings as configuration
from fleetplane.gen.nvidia.device.v1alpha1 import gpu_pb2, gpu_pb2_grpc, provider_pb2, provider_pb2_grpc
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import AlreadyExists, FleetplaneError, IntegrityError
from fleetplane.server import backups
from fleetplane.server.offline import DATABASE, DataDirectory


def place(data_dir: Path) -> DataDirectory:
    return DataDirectory(configuration.load(config=None, flags={"data_dir": str(data_dir)}), SystemClock())


def register(socket: str, *names: str) -> int:
    with grpc.insecure_channel(socket) as channel:
        stub = provider_pb2_grpc.ProviderServiceStub(channel)
        for name in names:
            answer = stub.RegisterGpu(provider_pb2.RegisterGpuRequest(name=name), timeout=60)
    return int(answer.resource_version)


def listed(socket: str) -> set[str]:
    with grpc.insecure_channel(socket) as channel:
        found = gpu_pb2_grpc.GpuServiceStub(channel).ListGpus(gpu_pb2.ListGpusRequest(), timeout=60)
    return {gpu.metadata.name for gpu in found.gpu_list.items}


def test_a_running_server_is_backed_up_and_restored_as_a_new_lineage(tmp_path: Path) -> None:
    data, packed = tmp_path / "data", tmp_path / "backup.tar"
    stop = threading.Event()
    with running_server(data, "--only", "gpus") as server:
        register(server.socket, "kept")
        (data / "objects").mkdir()
        (data / "objects" / "document").write_text("stored")

        def write() -> None:
            number = 0
            while not stop.is_set():
                register(server.socket, f"busy-{number}")
                number = (number + 1) % 1000  # there is a limit to how many there may be

        writing = threading.Thread(target=write)
        writing.start()
        try:
            done = execute("backup", str(packed), "--data-dir", str(data))
        finally:
            stop.set()
            writing.join()
        assert done.code == 0, done.err
        assert "verified" in done.out
        last = register(server.socket, "lost")
        assert server.stop() == 0
    assert packed.stat().st_mode & 0o777 == 0o600

    back = tmp_path / "back"
    back.mkdir(mode=0o700)
    (back / "master.key").write_bytes((data / "master.key").read_bytes())
    (back / "master.key").chmod(0o600)
    done = execute("restore", str(packed), "--data-dir", str(back))
    assert done.code == 0, done.err
    assert (back / "objects" / "document").read_text() == "stored"
    with running_server(back, "--only", "gpus") as server:
        names = listed(server.socket)
        assert "kept" in names
        assert "lost" not in names
        # What was given out by the lost lineage is never taken for a place in this one.
        with grpc.insecure_channel(server.socket) as channel:
            stub = gpu_pb2_grpc.GpuServiceStub(channel)
            for version in (last, last - 1, last + 1):
                opts = gpu_pb2.ListOptions(resource_version=str(version))
                with pytest.raises(grpc.RpcError) as refused:
                    next(iter(stub.WatchGpus(gpu_pb2.WatchGpusRequest(opts=opts), timeout=60)))
                assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
        assert register(server.socket, "new") > last
        assert server.stop() == 0
    verified = execute("audit", "verify", "--data-dir", str(back), "--anchor", str(back / "audit"))
    assert (verified.code, verified.out[:6]) == (0, "intact")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server that is stopped; only to be read."""
    made = tmp_path_factory.mktemp("backups") / "data"
    with running_server(made, "--only", "gpus") as server:
        register(server.socket, "one", "two")
        assert server.stop() == 0
    return made


def test_the_key_and_measurements_are_in_it_only_if_wanted(tmp_path: Path, data: Path) -> None:
    with closing(sqlite3.connect(data / "telemetry.db")) as database:
        database.execute("CREATE TABLE IF NOT EXISTS lines (text TEXT)")
    try:
        plain = backups.make(place(data), tmp_path / "plain.tar", backups.BackupContents())
        assert not {"master.key", "telemetry.db"} & set(plain.files)
        wanted = backups.BackupContents(telemetry=True, key=True)
        full = backups.make(place(data), tmp_path / "full.tar", wanted)
        assert {"master.key", "telemetry.db", DATABASE} <= set(full.files)
    finally:
        (data / "telemetry.db").unlink()
    # Without a key of its own, the directory gets the backup's.
    backups.restore(tmp_path / "full.tar", place(tmp_path / "new"), replace=False, actor="owner/t")
    assert (tmp_path / "new" / "master.key").read_bytes() == (data / "master.key").read_bytes()
    with pytest.raises(IntegrityError, match=r"master key .* is missing"):
        backups.restore(tmp_path / "plain.tar", place(tmp_path / "bare"), replace=False, actor="owner/t")
    assert not (tmp_path / "bare" / DATABASE).exists()
    assert not (tmp_path / "bare" / "master.key").exists()


def test_what_is_there_is_not_written_over(tmp_path: Path, data: Path) -> None:
    packed = tmp_path / "backup.tar"
    backups.make(place(data), packed, backups.BackupContents(key=True))
    with pytest.raises(AlreadyExists):
        backups.make(place(data), packed, backups.BackupContents())
    back = tmp_path / "back"
    backups.restore(packed, place(back), replace=False, actor="owner/t")
    first = (back / DATABASE).read_bytes()
    with pytest.raises(AlreadyExists, match="exists already"):
        backups.restore(packed, place(back), replace=False, actor="owner/t")
    done = backups.restore(packed, place(back), replace=True, actor="owner/t")
    assert done.aside is not None
    assert (done.aside / DATABASE).read_bytes() == first


def test_a_damaged_or_hostile_backup_is_refused_and_touches_nothing(tmp_path: Path, data: Path) -> None:
    packed = tmp_path / "backup.tar"
    backups.make(place(data), packed, backups.BackupContents(key=True))
    whole = packed.read_bytes()
    at = whole.index(b"SQLite format 3") + 5000
    flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    hostile = {
        "flipped": flipped,
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "no tar": os.urandom(4096),
        "climbing": _with(whole, "objects/../../evil"),
        "absolute": _with(whole, "/tmp/evil"),
        "unknown": _with(whole, "admin.sock"),
        "added": _with(whole, "objects/added"),
        "link": _with(whole, "objects/link", link="/etc/passwd"),
    }
    for name, content in hostile.items():
        bad = tmp_path / "bad.tar"
        bad.write_bytes(content)
        target = tmp_path / "target"
        with pytest.raises(FleetplaneError) as refused:
            backups.restore(bad, place(target), replace=False, actor="owner/t")
        assert refused.value.message, name
        left = {path.name for path in target.iterdir()} - {DATABASE + ".lock"}
        assert left == set(), name
    assert not Path("/tmp/evil").exists()


def _with(whole: bytes, name: str, link: str = "") -> bytes:
    """The same backup with one more member."""
    made = io.BytesIO(whole)
    with tarfile.open(fileobj=made, mode="a:") as archive:
        member = tarfile.TarInfo(name)
        if link:
            member.type, member.linkname = tarfile.SYMTYPE, link
            archive.addfile(member)
        else:
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
    return made.getvalue()


def test_a_rewritten_audit_log_is_not_backed_up_as_good(tmp_path: Path, data: Path) -> None:
    import shutil

    copy = tmp_path / "data"
    shutil.copytree(data, copy, ignore=shutil.ignore_patterns("*.sock"))
    with closing(sqlite3.connect(copy / DATABASE)) as database, database:
        database.execute("UPDATE resources SET body = x'00'")
    with pytest.raises(IntegrityError, match="not intact"):
        backups.make(place(copy), tmp_path / "backup.tar", backups.BackupContents())
    assert not (tmp_path / "backup.tar").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
