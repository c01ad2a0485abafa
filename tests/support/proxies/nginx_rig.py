"""A real NGINX for a test: its own folder, free ports on loopback, and small servers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import structlog
from support.shared.free_ports import free_port

from fleetplane.domains.proxies.agent.nginx import control
from fleetplane.domains.proxies.agent.nginx.applier import VersionApplier
from fleetplane.domains.proxies.agent.nginx.confinement import worker_user
from fleetplane.domains.proxies.agent.nginx.confirmation import NginxWorker, VersionStatus
from fleetplane.domains.proxies.agent.nginx.control import Nginx
from fleetplane.domains.proxies.agent.nginx.processes import find_master, orphans
from fleetplane.domains.proxies.agent.nginx.releases import StagedVersions
from fleetplane.domains.proxies.agent.nginx.staging import StagingStep
from fleetplane.domains.proxies.nginx.site import Binary, Paths, Site
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import SystemClock

NGINX = Path(shutil.which("nginx") or "/usr/sbin/nginx")
STEADY_SECONDS = 0.15
"""Shorter than in service: these machines have nobody to wait for."""
LIMIT_SECONDS = 60.0
"""Longer than in service: they may have much else to do."""


def binary() -> Binary:
    told = subprocess.run([NGINX, "-V"], capture_output=True, text=True, check=True)
    return Binary.parse(NGINX, told.stderr)


@contextlib.contextmanager
def state_folder() -> Iterator[Path]:
    """Short, since it holds a Unix socket; what workers need of it lies beside it."""
    folder = Path(tempfile.mkdtemp(prefix="fp-"))
    try:
        # How long it takes to answer and to end says something about the machine.
        with patch.object(control, "ASK_SECONDS", LIMIT_SECONDS):
            yield folder
    finally:
        stop_nginx(paths_in(folder))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(_work(folder), ignore_errors=True)
        shutil.rmtree(web_folder(folder), ignore_errors=True)


def _work(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-work")


def _as_root(folder: Path) -> bool:
    return os.geteuid() == 0 and folder.stat().st_uid == 0


def web_folder(folder: Path) -> Path:
    """The document root of a rig, which its workers can read."""
    return folder.with_name(f"{folder.name}-www")


def paths_in(folder: Path) -> Paths:
    """As an agent of the folder's owner would have them."""
    return Paths(state=folder, work=_work(folder) if _as_root(folder) else None)


def stop_nginx(paths: Paths) -> None:
    deadline = time.monotonic() + 60
    while (master := find_master(paths.pid, paths.config)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(master.pid, signal.SIGTERM)
        assert time.monotonic() < deadline, "NGINX does not stop"
        time.sleep(0.02)
    for pid in orphans(paths.logs):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


class Rig:
    """The parts of an agent that concern NGINX."""

    def __init__(self, folder: Path, **site: object) -> None:
        self.paths = paths_in(folder)
        site.setdefault("document_roots", (web_folder(folder), Path("/srv/www")))
        user = worker_user("") if _as_root(folder) else ""
        self.site = Site(
            paths=self.paths,
            binary=binary(),
            addresses=("127.0.0.1",),
            workers="2",
            worker_user=user,
            **site,  # type: ignore[arg-type]
        )
        self.releases = StagedVersions(self.paths)
        self.statuses: list[VersionStatus] = []
        self.nginx = Nginx(
            self.site, SystemClock(), steady_seconds=STEADY_SECONDS, limit_seconds=LIMIT_SECONDS
        )

    def applier(
        self, witness: Callable[[StagingStep], None] = lambda _: None, *, managed: bool = True
    ) -> VersionApplier:
        return VersionApplier(
            nginx=self.nginx,
            releases=self.releases,
            clock=SystemClock(),
            log=structlog.get_logger(),
            managed=managed,
            least_gap_seconds=0.0,
            witness=witness,
        )

    async def workers(self) -> frozenset[NginxWorker]:
        """All of them: a release is confirmed as soon as some have answered for a while."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(found := self.nginx.workers()) < int(self.site.workers):
                await asyncio.sleep(0.01)
        return found

    async def report(self, status: VersionStatus) -> None:
        self.statuses.append(status)


class Backend:
    """An HTTP server that answers with its name, or as the test wishes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = 200
        self.port = free_port()  # it may go and come back
        self.requests: list[str] = []
        self._server: asyncio.Server | None = None
        self._visits: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Die: nobody is listened to any more, and open connections break."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._visits.values():
            writer.transport.abort()
        if self._visits:
            await asyncio.wait(self._visits)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visit = asyncio.current_task()
        assert visit is not None
        self._visits[visit] = writer
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            self._visits.pop(visit)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while self._server is not None:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head.decode("latin-1"))
                body = self.name.encode()
                words = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(words.encode() + body)
                await writer.drain()


@contextlib.asynccontextmanager
async def backend(name: str) -> AsyncIterator[Backend]:
    one = Backend(name)
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


def upstream(*servers: str, identity: str = "u1", **options: object) -> pb.Upstream:
    return pb.Upstream(
        id=identity,
        name=identity,
        servers=[
            pb.UpstreamServer(address=server, weight=1, max_fails=3, fail_timeout_seconds=1)
            for server in servers
        ],
        **options,  # type: ignore[arg-type]
    )


def host(port: int, *locations: pb.Location, identity: str = "h1", name: str = "a.test") -> pb.VirtualHost:
    return pb.VirtualHost(id=identity, name=identity, server_name=name, listen_port=port, locations=locations)


def saying(version: int, port: int, words: str = "") -> pb.ConfigUpdate:
    """A configuration that answers `/` with a text; its version unless told otherwise."""
    location = pb.Location(path="/", custom_directives={"return": f"200 {words or version}"})
    return pb.ConfigUpdate(config_id=f"c{version}", version=version, virtual_hosts=[host(port, location)])
