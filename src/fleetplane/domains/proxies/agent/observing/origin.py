"""An NGINX that somebody else started: which one it is, and how to stop it and start it as it was started."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fleetplane.domains.proxies.agent.nginx import processes
from fleetplane.domains.proxies.agent.nginx.processes import PROC, Master
from fleetplane.domains.proxies.agent.nginx.running import run
from fleetplane.kernel.clock import Clock
from fleetplane.node import safe_open

STOP_SECONDS: Final = 10.0
"""For the ports to be free: a graceful stop closes them at once, and ends when its visitors have left."""
START_SECONDS: Final = 20.0
POLL_SECONDS: Final = 0.05
LISTENING_LIMIT: Final = 64
WORDS_LIMIT: Final = 2000
PID_BYTES: Final = 32
_TITLE: Final = re.compile(r"nginx: master process (?P<command>.+?)\s*$", re.DOTALL)
_OPTIONS: Final = frozenset({"-c", "-p", "-e", "-g", "-q"})
_LISTEN: Final = "0A"
_START: Final = '"$@" </dev/null >/dev/null 2>&1 &'
"""In the background of a shell that ends: an NGINX that stays in the foreground is nobody's child of ours."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """How an NGINX was running, so that it can be started in the same way."""

    pid: int
    started: int
    program: str
    arguments: tuple[str, ...]
    folder: str
    """In which it was started."""
    listening: tuple[str, ...]
    unit: str = ""
    """The service that it belongs to, if it does."""


def arguments_of(title: str) -> tuple[str, ...]:
    """The program and arguments that a master's title tells; NGINX joins them by blanks. Pure."""
    found = _TITLE.match(title)
    if found is None:
        return ()
    program, *words = found["command"].split(" ")
    made = [program]
    for word in words:
        if word in _OPTIONS or made[-1] in _OPTIONS or len(made) == 1:
            made.append(word)
        elif made[-2] in _OPTIONS:  # a value with blanks in it, as of -g
            made[-1] = f"{made[-1]} {word}"
        else:
            made.append(word)
    return tuple(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class NginxOrigin:
    """Which NGINX is meant."""

    program: Path
    config: Path
    default_config: Path
    """What the program reads unless it is told otherwise."""
    systemctl: Path | None = None


def find(place: NginxOrigin, pid_file: Path, ports: Iterable[int], *, proc: Path = PROC) -> Origin | None:
    """The running NGINX of this configuration; None if there is none, or it is another.

    `ports` are those of its configuration, for an agent that may not see what the process has open.
    """
    if (pid := _number_in(pid_file)) is None:
        return None
    arguments = arguments_of(processes.title_of(proc, pid))
    started = processes.started_at(proc, pid)
    if not arguments or started is None or not _is_of(arguments, place) or not _is_trusted(proc, pid):
        return None
    try:
        program = str((proc / str(pid) / "exe").readlink()).removesuffix(" (deleted)")
        folder = str((proc / str(pid) / "cwd").readlink())
    except OSError:
        program, folder = str(place.program), "/"
    group = processes.control_group(proc, str(pid))
    return Origin(
        pid=pid,
        started=started,
        program=program if Path(program).is_file() else str(place.program),
        arguments=arguments[1:],
        folder=folder,
        listening=tuple(listening(pid, ports, proc=proc)),
        unit=group.rpartition("/")[2] if place.systemctl is not None else "",
    )


def _number_in(pid_file: Path) -> int | None:
    """A configuration can name a pipe or a device: only of an ordinary file some bytes are read."""
    try:
        with safe_open.file(Path(os.path.realpath(pid_file)), os.O_RDONLY) as descriptor:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return int(os.read(descriptor, PID_BYTES)) if is_file else None
    except (OSError, ValueError):
        return None


def _is_trusted(proc: Path, pid: int) -> bool:
    """Whether root runs a process, or whoever runs this agent.

    Anybody can call a process an NGINX master, and its program is what the agent starts to give back. Not the
    owner of its folder in /proc is asked: a process that may not be looked into shows root there.
    """
    try:
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    owners = next((line.split()[1:] for line in lines if line.startswith("Uid:")), [])
    return bool(owners) and {int(one) for one in owners} <= {0, os.geteuid()}


def _is_of(arguments: tuple[str, ...], place: NginxOrigin) -> bool:
    named = [value for option, value in itertools.pairwise(arguments) if option == "-c"]
    if not named:
        return os.path.realpath(place.config) == os.path.realpath(place.default_config)
    prefix = [value for option, value in itertools.pairwise(arguments) if option == "-p"]
    told = os.path.join(prefix[-1] if prefix else place.default_config.parent, named[-1])  # noqa: PTH118
    return os.path.realpath(told) == os.path.realpath(place.config)


def listening(pid: int, ports: Iterable[int], *, proc: Path = PROC) -> list[str]:
    """The TCP addresses that a process listens on, such as `0.0.0.0:80`.

    Where the kernel does not show what it has open, those on these ports that anybody listens on.
    """
    try:
        links = [str(one.readlink()) for one in (proc / str(pid) / "fd").iterdir()]
    except OSError:
        known = frozenset(ports)
        found = {at for address, _ in _listeners(proc) if (at := _address(address))[0] in known}
    else:
        held = {link[8:-1] for link in links if link.startswith("socket:[")}
        found = {_address(address) for address, inode in _listeners(proc) if inode in held}
    return [address for _, address in sorted(found)][:LISTENING_LIMIT]


def taken(addresses: Iterable[str], *, proc: Path = PROC) -> bool:
    """Whether anybody still listens on one of these addresses."""
    return not {_address(address)[1] for address, _ in _listeners(proc)}.isdisjoint(addresses)


def _listeners(proc: Path) -> Iterable[tuple[str, str]]:
    """Every listening TCP socket, by its address and its inode."""
    for table in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if len(columns) > 9 and columns[3] == _LISTEN:
                yield columns[1], columns[9]


def _address(column: str) -> tuple[int, str]:
    """An address as `/proc/net` writes it: words of four bytes, each in this machine's order."""
    text, _, port = column.partition(":")
    words = [bytes.fromhex(text[at : at + 8]) for at in range(0, len(text), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    address = ipaddress.ip_address(packed)
    number = int(port, 16)
    return number, f"{address}:{number}" if address.version == 4 else f"[{address}]:{number}"


def is_alive(origin: Origin, *, proc: Path = PROC) -> bool:
    return processes.started_at(proc, origin.pid) == origin.started


def workers_of(origin: Origin) -> int:
    return len(processes.workers(Master(pid=origin.pid, started=origin.started)))


class NginxRunner:
    """Stops and starts an NGINX that is not ours."""

    def __init__(self, place: NginxOrigin, clock: Clock) -> None:
        self._place = place
        self._clock = clock

    async def stop(self, origin: Origin) -> str:
        """Have it let go of its ports; visitors that it has may finish. Why not, if it does not."""
        if origin.unit and self._place.systemctl is not None:
            code, output = await run(str(self._place.systemctl), "stop", origin.unit)
            return "" if code == 0 else output.strip()[:WORDS_LIMIT]
        if fault := self._signal(origin, signal.SIGQUIT):
            return fault
        is_free = await self._until(lambda: not taken(origin.listening), STOP_SECONDS)
        return "" if is_free else "the observed NGINX does not let go of its ports"

    async def end(self, origin: Origin) -> None:
        """Have what is left of it gone: a master that ends late takes the pid file of the next one along."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not is_alive(origin) or self._signal(origin, number):
                return
            if await self._until(lambda: not is_alive(origin), STOP_SECONDS):
                return

    async def start(self, origin: Origin, serves: Callable[[], bool]) -> str:
        """Start it as it was started before, and see it listen. Why not, if it does not."""
        code, output = await run(origin.program, *origin.arguments, "-t")
        if code != 0:
            return output.strip()[:WORDS_LIMIT]
        if origin.unit and self._place.systemctl is not None:
            code, output = await run(str(self._place.systemctl), "start", origin.unit)
            if code != 0:
                return output.strip()[:WORDS_LIMIT]
        else:
            await self._spawn(origin)
        if await self._until(serves, START_SECONDS):
            return ""
        return "the observed NGINX was started, and does not listen as it did before"

    async def _spawn(self, origin: Origin) -> None:
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            _START,
            "sh",
            origin.program,
            *origin.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            cwd=origin.folder,
            start_new_session=True,
        )
        await process.wait()

    def _signal(self, origin: Origin, number: signal.Signals) -> str:
        if not is_alive(origin):
            return ""
        try:
            os.kill(origin.pid, number)
        except ProcessLookupError:
            return ""
        except PermissionError:
            return "the observed NGINX belongs to another user: this agent cannot stop it"
        return ""

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = self._clock.monotonic() + seconds
        while not condition():
            if self._clock.monotonic() > deadline:
                return False
            await self._clock.sleep(POLL_SECONDS)
        return True
