"""The NGINX of this machine: test a configuration, start, signal, ask, and watch a change happen.

Does what it is told and says what it saw; what to do next is decided by the `applier`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.agent.nginx import processes
from fleetplane.domains.proxies.agent.nginx.confinement import Confinement
from fleetplane.domains.proxies.agent.nginx.confirmation import (
    LIMIT_SECONDS,
    STEADY_SECONDS,
    WORDS_LIMIT,
    Confirmed,
    NginxWorker,
    RefusedVersion,
    Verdict,
    VersionTrial,
    WorkerLook,
)
from fleetplane.domains.proxies.agent.nginx.http_get import StubStatus, get_unix, parse_stub_status
from fleetplane.domains.proxies.agent.nginx.processes import Master
from fleetplane.domains.proxies.agent.nginx.running import run
from fleetplane.domains.proxies.nginx.rendering import RELEASE_PATH, STATUS_PATH
from fleetplane.domains.proxies.nginx.site import Binary, Site
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError
from fleetplane.node.logs.tail import NotALog, open_log

ASK_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.03
FATAL_MARKS: Final = ("[emerg]", "[alert]", "[crit]", "conflicting server name")
"""What makes a tested configuration a bad one, whatever the exit code. The last is only a warning
to NGINX, which then ignores one of the two servers."""
LOG_READ_LIMIT: Final = 256 * 1024


async def find_binary(path: Path) -> Binary:
    try:
        _, output = await run(str(path), "-V")
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be run: {error}", hint="install NGINX or name its path"
        ) from error
    return Binary.parse(path, output)


class Nginx:
    def __init__(
        self,
        site: Site,
        clock: Clock,
        *,
        steady_seconds: float = STEADY_SECONDS,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self.site = site
        self._clock = clock
        self._steady_seconds = steady_seconds
        self._limit_seconds = limit_seconds
        self.asked = 0
        """Requests of our own that the running NGINX counts among its visitors'."""
        self._asked_master: Master | None = None
        self._known_workers: frozenset[NginxWorker] = frozenset()
        """Those of the running NGINX, as they were last seen."""

    def __repr__(self) -> str:
        return f"<Nginx {self.site.binary.words} master={self.master()}>"

    # Testing.

    async def test(self, config: Path) -> str:
        """Why a configuration cannot be used, in NGINX's words; empty if it can, as far as it knows."""
        return _judged(*await run(str(self.site.binary.path), *_testing(config, self.site.paths.state)))

    async def test_foreign(self, config: Path, folder: Path, confinement: Confinement) -> str:
        """Test foreign text, in a sandbox and a folder of its own."""
        program = self.site.binary.path
        return _judged(*await confinement.run(program, *_testing(config, folder), folder=folder))

    # Looking.

    def master(self) -> Master | None:
        return processes.find_master(self.site.paths.pid, self.site.paths.config)

    def workers(self) -> frozenset[NginxWorker]:
        master = self.master()
        if master is None:
            return frozenset()
        self._known_workers = processes.workers(master)
        return self._known_workers

    async def answering(self) -> str | None:
        """The release that answers."""
        answer = await self._ask(RELEASE_PATH)
        return None if answer is None else answer.decode(errors="replace")

    async def figures(self) -> StubStatus | None:
        answer = await self._ask(STATUS_PATH)
        return None if answer is None else parse_stub_status(answer)

    async def _ask(self, target: str) -> bytes | None:
        answer = await get_unix(self.site.paths.socket, target, timeout=ASK_SECONDS, sent=self._count)
        if answer is None:
            return None
        self.workers()
        return answer.body if answer.status == 200 else None

    def _count(self) -> None:
        """NGINX counts what it was sent, also if its answer comes too late for us."""
        if (master := self.master()) != self._asked_master:
            self._asked_master, self.asked = master, 0
        self.asked += 1

    # Acting.

    async def start(self, release: str) -> Verdict:
        """Start the linked configuration and see it answer. Nothing may be running."""
        paths = self.site.paths
        paths.socket.unlink(missing_ok=True)  # of one that was killed; it would be in the way
        left = await asyncio.to_thread(processes.orphans, paths.logs, known=self._known_workers)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(
                    pid, signal.SIGQUIT
                )  # lets go of the ports at once, and of visitors when they are done
        log = AddedLines(paths.error_log)
        code, output = await run(
            str(self.site.binary.path),
            "-p",
            str(paths.state),
            "-e",
            str(paths.error_log),
            "-c",
            str(paths.config),
        )
        if code != 0:
            return RefusedVersion((output.strip() or "; ".join(log.lines()))[:WORDS_LIMIT])
        # It has gone to the background, where it says its number as soon as the machine lets it.
        while (master := self.master()) is None and log.age(self._clock) < self._limit_seconds:
            await self._clock.sleep(POLL_SECONDS)
        return await self._watch(release, before=frozenset(), master=master, log=log)

    async def reload(self, release: str, *, signalled: Callable[[], None] = lambda: None) -> Verdict:
        """Have the linked configuration taken, and see it answer and keep answering."""
        master = self.master()
        if master is None:
            return RefusedVersion("NGINX is not running")
        log, before = AddedLines(self.site.paths.error_log), processes.workers(master)
        if not self.signal(signal.SIGHUP):
            return RefusedVersion(
                "NGINX cannot be signalled: it is gone, or runs as a user we have no power over"
            )
        signalled()
        return await self._watch(release, before=before, master=master, log=log)

    def signal(self, number: signal.Signals) -> bool:
        master = self.master()
        if master is None:
            return False
        try:
            os.kill(master.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    async def stop(self, *, graceful: bool, within_seconds: float) -> bool:
        """False if it is still there. A graceful stop that takes too long becomes a quick one."""
        if graceful and self.signal(signal.SIGQUIT) and await self._gone(within_seconds):
            return True
        self.signal(signal.SIGTERM)
        return await self._gone(max(within_seconds, ASK_SECONDS))

    async def _gone(self, seconds: float) -> bool:
        deadline = self._clock.monotonic() + seconds
        while self.master() is not None:
            if self._clock.monotonic() > deadline:
                return False
            await self._clock.sleep(POLL_SECONDS)
        return True

    async def _watch(
        self, release: str, *, before: frozenset[NginxWorker], master: Master | None, log: AddedLines
    ) -> Verdict:
        trial = VersionTrial(
            release=release,
            before=before,
            master=0 if master is None else master.pid,
            started=self._clock.monotonic(),
            steady_seconds=self._steady_seconds,
            limit_seconds=self._limit_seconds,
        )
        while True:
            answer = await self.answering()
            found = self.master()
            look = WorkerLook(
                now=self._clock.monotonic(),
                answer=answer,
                workers=frozenset() if found is None else processes.workers(found),
                running=found is not None and found == master,
                log=log.lines(),
            )
            if (verdict := trial.observe(look)) is not None:
                return verdict
            await self._clock.sleep(POLL_SECONDS)


def _testing(config: Path, prefix: Path) -> list[str]:
    return ["-p", str(prefix), "-e", "stderr", "-c", str(config), "-t"]


def _judged(code: int, output: str) -> str:
    fatal = [line for line in output.splitlines() if any(mark in line for mark in FATAL_MARKS)]
    if code == 0 and not fatal:
        return ""
    said = "; ".join(line.removeprefix("nginx: ") for line in fatal) or output.strip()
    return said[:WORDS_LIMIT] or f"nginx -t ended with {code}"


class AddedLines:
    """The lines that are added to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._opened: float | None = None

    def age(self, clock: Clock) -> float:
        """Seconds since this was first asked."""
        self._opened = clock.monotonic() if self._opened is None else self._opened
        return clock.monotonic() - self._opened

    def lines(self) -> list[str]:
        try:
            with open_log(self._path) as file:
                file.seek(self._offset)
                new = file.read(LOG_READ_LIMIT)
        except (FileNotFoundError, NotALog):
            return []
        self._offset += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


__all__ = ["AddedLines", "Confirmed", "Nginx", "RefusedVersion", "find_binary"]
