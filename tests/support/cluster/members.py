"""Several real servers on one PostgreSQL and one NATS, each with a network of its own that can be cut.

A server that ends is started again, as systemd would do.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.shared import warm_start
from support.shared.free_ports import free_port
from support.shared.nats_server import NatsServer
from support.shared.postgres_server import PostgresServer
from support.shared.rough_network import RoughNetwork, rough_network
from support.shared.server_process import command, is_leader

DEADLINE_SECONDS = 60.0
START_SECONDS = 120.0
RESTART_SECONDS = 0.3
LOOK_SECONDS = 0.05


async def until(holds: Callable[[], object], what: Callable[[], str] | str, seconds: float) -> float:
    """Wait for a condition; the seconds that it took."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, what if isinstance(what, str) else what()
        await asyncio.sleep(LOOK_SECONDS)
    return time.monotonic() - begun


@dataclass(slots=True)
class Member:
    """One server: its folder, its way to the database and to NATS, and the process that it is now."""

    name: str
    folder: Path
    environment: dict[str, str]
    arguments: Sequence[str]
    database: RoughNetwork
    bus: RoughNetwork
    web: str
    edge: str
    process: subprocess.Popen[str] | None = None
    is_wanted: bool = True
    """Whether it is started again when it ends."""
    ended: list[int] = field(default_factory=list)
    """How each of its processes ended."""
    _told_before: int = 0

    @property
    def ready(self) -> Path:
        return self.folder / "ready.json"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def told(self) -> str:
        """By the process that it is now."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._told_before)
            return log.read().decode()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def is_active(self) -> bool:
        return self.is_running and is_leader(self.ready)

    @property
    def serves(self) -> bool:
        """Whether it answers, as the active one or as one that stands by."""
        if not self.is_running:
            return False
        return self.ready.exists()

    def start(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ready.unlink(missing_ok=True)
        self._told_before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as stderr:
            self.process = warm_start.started(
                [*command(self.folder, *self.arguments), "--ready-file", str(self.ready)],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **self.environment},
            )

    def signal(self, how: signal.Signals) -> None:
        if self.is_running:
            assert self.process is not None
            self.process.send_signal(how)

    def end(self) -> None:
        self.is_wanted = False
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(DEADLINE_SECONDS)

    def heal(self) -> None:
        self.database.heal()
        self.bus.heal()


@dataclass(slots=True)
class ServerCluster:
    """All of them."""

    members: list[Member]
    nats: NatsServer
    postgres: PostgresServer
    url: str
    """Of the database, past all networks that can be cut."""
    master_key: str

    def __getitem__(self, name: str) -> Member:
        return next(one for one in self.members if one.name == name)

    @property
    def active(self) -> Member | None:
        """The last one that says so: one that was stopped does not know yet."""
        found: list[tuple[int, Member]] = []
        for one in self.members:
            with suppress(FileNotFoundError):  # one that ends takes it away
                if one.is_active:
                    found.append((one.ready.stat().st_mtime_ns, one))
        return max(found, key=lambda pair: pair[0], default=(0, None))[1]

    @property
    def standbys(self) -> list[Member]:
        active = self.active
        return [one for one in self.members if one is not active]

    def told(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.told()[-4000:]}" for one in self.members)

    def heal(self) -> None:
        for one in self.members:
            one.heal()
            one.signal(signal.SIGCONT)

    async def until(self, holds: Callable[[], object], seconds: float = START_SECONDS) -> float:
        return await until(holds, self.told, seconds)

    async def all_serve(self) -> None:
        """Those that are to run."""
        await self.until(
            lambda: self.active is not None and all(one.serves for one in self.members if one.is_wanted)
        )

    async def the_active(self) -> Member:
        await self.until(lambda: self.active is not None)
        active = self.active
        assert active is not None
        return active

    async def kill(self, member: Member) -> None:
        """With SIGKILL; returns when another process has its place."""
        before = member.process
        assert before is not None
        member.signal(signal.SIGKILL)
        await self.until(lambda: member.process is not before)

    async def keep(self) -> None:
        """Start again whoever ended."""
        while True:
            for one in self.members:
                if one.is_wanted and one.process is not None and (code := one.process.poll()) is not None:
                    one.ended.append(code)
                    await asyncio.sleep(RESTART_SECONDS)
                    if one.is_wanted:
                        one.start()
            await asyncio.sleep(LOOK_SECONDS)

    async def run(
        self, *arguments: str, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """A command of the product, with the settings of the servers; its code, output and errors."""
        process = await asyncio.create_subprocess_exec(
            *command(Path("/"))[:3],
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                **self.members[0].environment,
                "FLEETPLANE_STORE__URL": self.url,
                **(environment or {}),
            },
        )
        out, err = await process.communicate(stdin)
        return process.returncode or 0, out.decode(), err.decode()

    async def token(self, name: str, role: str = "admin", expires: str = "24h") -> str:
        """Made on the server that is active."""
        active = await self.the_active()
        place = ("--data-dir", str(active.folder))
        code, out, err = await self.run(
            "tokens", "create", name, "--role", role, "--expires", expires, *place
        )
        assert code == 0, err
        return out.strip().splitlines()[-1]


FAST = """
import time

now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + 3600, lambda: now_ns() + 3600 * 10**9
"""


def an_hour_fast(folder: Path) -> dict[str, str]:
    """For the environment of a server whose clock runs ahead; how time passes stays right."""
    site = folder / "an-hour-fast"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(FAST)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))}


@asynccontextmanager
async def server_cluster(
    folder: Path,
    postgres: PostgresServer,
    *,
    names: Sequence[str] = ("one", "two", "three"),
    domains: str = "edge",
    environment: Mapping[str, str] | None = None,
    own: Mapping[str, Mapping[str, str]] | None = None,
    later: Sequence[str] = (),
    prepare: Callable[[str, str], Awaitable[None]] | None = None,
) -> AsyncIterator[ServerCluster]:
    """Started all at once on an empty database, and not waited for. `own` is one server's environment.

    Those in `later` are for the test to start. `prepare` fills the database before, with its address and the
    master key.
    """
    url = postgres.database()
    key = base64.b64encode(secrets.token_bytes(32)).decode()
    if prepare is not None:
        await prepare(url, key)
    nats = NatsServer(folder)
    nats.start()
    direct = f"127.0.0.1:{postgres.port}"
    async with AsyncExitStack() as stack:
        stack.callback(nats.stop)
        cluster = ServerCluster(members=[], nats=nats, postgres=postgres, url=url, master_key=key)
        for name in (*names, *later):
            database = await stack.enter_async_context(rough_network(direct))
            bus = await stack.enter_async_context(rough_network(f"127.0.0.1:{nats.port}"))
            web, edge = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            listeners = {"web": web, "edge": edge}
            wanted = [f"listeners.{one}.addresses={address}" for one, address in listeners.items()]
            cluster.members.append(
                Member(
                    name=name,
                    folder=folder / name,
                    environment={
                        "FLEETPLANE_STORE__URL": url.replace(direct, database.address),
                        "FLEETPLANE_STORE__SERVER": name,
                        "FLEETPLANE_BUS__URL": f"nats://{bus.address}",
                        "FLEETPLANE_IDENTITY__MASTER_KEY": key,
                        **(environment or {}),
                        **(own or {}).get(name, {}),
                    },
                    arguments=[
                        "--only",
                        domains,
                        *(word for setting in wanted for word in ("--set", setting)),
                    ],
                    database=database,
                    bus=bus,
                    web=web,
                    edge=edge,
                    is_wanted=name not in later,
                )
            )
        try:
            for one in cluster.members:
                if one.is_wanted:
                    one.start()
            async with asyncio.TaskGroup() as tasks:
                keeping = tasks.create_task(cluster.keep())
                try:
                    yield cluster
                finally:
                    keeping.cancel()
        finally:
            for one in cluster.members:
                one.end()
