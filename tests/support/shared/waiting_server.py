"""A real `fleetplane server` that stands by."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from support.shared import warm_start
from support.shared.server_process import START_SECONDS, STOP_SECONDS, ServerProcess, command, is_leader

PATIENT = Path(__file__).parents[1] / "patient"


def patient(folder: Path | None = None, *, reads: bool = False, more: str = "") -> dict[str, str]:
    """For the environment of servers which keep their seat although the machine stands still for seconds;
    if wanted, they answer then, too, and wait for the database, as all should whose test is not about that.
    More of what they begin with is kept in a folder."""
    site = PATIENT / ("reads" if reads else "seat")
    if more:
        assert folder is not None
        own = folder / "site"
        own.mkdir(parents=True)
        (own / "sitecustomize.py").write_text((site / "sitecustomize.py").read_text() + more)
        site = own
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


class WaitingServer:
    """Started and not waited for; killed at the end if it still runs."""

    def __init__(self, folder: Path, environment: Mapping[str, str], *arguments: str) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self._ready, self._log = folder / "ready.json", folder / "server.log"
        with self._log.open("a") as stderr:
            self.process = warm_start.started(
                [*command(folder, *arguments), "--ready-file", str(self._ready)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **environment},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def told(self) -> str:
        return self._log.read_text()

    def until(self, holds: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait for a condition, as long as the process lives."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.02)

    @property
    def is_ready(self) -> bool:
        """Whether it is active."""
        return is_leader(self._ready)

    @property
    def serves(self) -> bool:
        """Whether it is active, or serves reads."""
        return self._ready.exists()

    def server(self) -> ServerProcess:
        said = json.loads(self._ready.read_text())
        return ServerProcess(
            process=self.process, pid=said["pid"], listeners=said["listeners"], log=self._log
        )
