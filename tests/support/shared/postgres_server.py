"""A real PostgreSQL for tests: its own directory and port, gone with the test."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from support.shared.free_ports import free_port

from fleetplane.kernel.store.engines import postgres, postgres_line
from fleetplane.kernel.store.servers import leader_lease
from fleetplane.kernel.telemetry.postgres import link

START_SECONDS = 60.0
ACCOUNT = "postgres"
MEMORY = Path("/dev/shm")  # where durability is not what is tested, files are best kept in memory
MEMORY_BYTES = 2 * 1024**3
"""Free there, at least: 7 MB for each of some fifty databases, a few times over for tests in parallel."""
SETTINGS = {
    "fsync": "off",
    "max_connections": "100",
    "shared_buffers": "16MB",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "fatal",
}
PATIENT = {"statement_timeout": "60000", "idle_in_transaction_session_timeout": "60000"}
"""In milliseconds."""


def binaries() -> Path:
    """Where Debian keeps the newest one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[4]))
    if not found:
        raise FileNotFoundError("PostgreSQL is not installed: apt-get install postgresql")
    return found[-1].parent


def as_other() -> dict[str, object]:
    """It refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    account = pwd.getpwnam(ACCOUNT)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


class PostgresServer:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<PostgresServer {self.port}>"

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://{ACCOUNT}@127.0.0.1:{self.port}/{database}"

    def start(self, **settings: str) -> None:
        options = [f"-c{name}={value}" for name, value in {**SETTINGS, **settings}.items()]
        place = ["-D", self.folder / "data", f"-p{self.port}", f"-k{self.folder}"]
        with (self.folder / "log").open("ab") as told:
            self._process = subprocess.Popen(
                [binaries() / "postgres", *place, *options],
                stdout=subprocess.DEVNULL,
                stderr=told,
                cwd="/",
                **as_other(),
            )  # type: ignore[call-overload]
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(
            [binaries() / "pg_isready", "-q", "-h127.0.0.1", f"-p{self.port}"], check=False
        ).returncode:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(how)
            self._process.wait(START_SECONDS)
            self._process = None

    def database(self) -> str:
        """A new, empty one; its address."""
        name = f"test_{secrets.token_hex(6)}"
        subprocess.run(
            [binaries() / "createdb", "-h127.0.0.1", f"-p{self.port}", f"-U{ACCOUNT}", name], check=True
        )
        return self.url(name)


@contextmanager
def running() -> Iterator[PostgresServer]:
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES
    folder = Path(tempfile.mkdtemp(prefix="fleetplane-pg-", dir=MEMORY if roomy else None))
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, ACCOUNT)
        subprocess.run(
            [
                binaries() / "initdb",
                "-D",
                folder / "data",
                f"-U{ACCOUNT}",
                "-Atrust",
                "-EUTF8",
                "--no-sync",
                "--locale=C.UTF-8",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
            **as_other(),
        )  # type: ignore[call-overload]
        server = PostgresServer(folder, free_port())
        server.start()
        try:
            # How long it takes to let somebody in, to hear them leave, or a reader to go on, says something
            # about the machine.
            with (
                patch.object(postgres_line, "CONNECT_SECONDS", START_SECONDS),
                patch.object(leader_lease, "LEAVE_SECONDS", START_SECONDS),
                patch.dict(postgres.READER, PATIENT),
                patch.dict(link.READER, PATIENT),
                patch.dict(link.WRITER, {**PATIENT, "lock_timeout": "60000", "statement_timeout": "0"}),
                patch.dict(link.PATIENCE, {"write": START_SECONDS, "question": START_SECONDS}),
            ):
                yield server
        finally:
            server.stop(signal.SIGQUIT)  # without a last checkpoint: its files are deleted
    finally:
        shutil.rmtree(folder, ignore_errors=True)
