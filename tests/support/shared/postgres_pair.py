"""A real PostgreSQL and a replica of it that follows by streaming and can be promoted."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.shared.free_ports import free_port
from support.shared.postgres_server import ACCOUNT, START_SECONDS, PostgresServer, as_other, binaries, running


class PostgresPair:
    """The one that takes writes, and the one that would in its place."""

    def __init__(self, primary: PostgresServer, replica: PostgresServer) -> None:
        self.primary = primary
        self.replica = replica

    def __repr__(self) -> str:
        return f"<PostgresPair {self.primary.port} {self.replica.port}>"

    def database(self) -> str:
        """A new one; the address by which whichever takes writes is found."""
        url = self.primary.database()
        both = f"127.0.0.1:{self.primary.port},127.0.0.1:{self.replica.port}"
        return url.replace(f"127.0.0.1:{self.primary.port}", both) + "?target_session_attrs=read-write"

    def fail_over(self) -> None:
        """Kill the primary and promote the replica."""
        self.primary.stop(signal.SIGQUIT)
        subprocess.run(
            [
                binaries() / "pg_ctl",
                "promote",
                "-w",
                f"-t{START_SECONDS:.0f}",
                "-D",
                self.replica.folder / "data",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
            **as_other(),
        )  # type: ignore[call-overload]


@contextmanager
def pair(*, synchronous: bool) -> Iterator[PostgresPair]:
    with running() as primary:
        folder = Path(tempfile.mkdtemp(prefix="fleetplane-pg-", dir=primary.folder.parent))
        replica = PostgresServer(folder, free_port())
        try:
            if as_other():
                shutil.chown(folder, ACCOUNT)
            subprocess.run(
                [
                    *(binaries() / "pg_basebackup", "-D", folder / "data", "-h127.0.0.1"),
                    *(f"-p{primary.port}", f"-U{ACCOUNT}", "-R", "-Xstream", "-cfast", "--no-sync"),
                ],
                check=True,
                cwd="/",
                **as_other(),
            )  # type: ignore[call-overload]
            replica.start()
            if synchronous:
                primary.stop()
                primary.start(synchronous_standby_names="*")
            yield PostgresPair(primary, replica)
        finally:
            replica.stop(signal.SIGQUIT)
            shutil.rmtree(folder, ignore_errors=True)
