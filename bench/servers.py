"""Starting the servers that are measured, each confined to one core.

The load generator is this process and its children, on another core. Both servers of a figure
run at the same time and are measured in turns, so that a busy minute hurts both.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 120.0
STOP_SECONDS = 60.0
POLL_SECONDS = 0.001
LISTENERS = ("web", "device-api", "registration", "operator", "agent", "proxy-agents", "boards", "edge")
"""All of them get free ports: two servers of a figure run at once."""


def cores() -> tuple[int, int]:
    """The server's core and the load generator's."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("the benchmarks need two cores: one for the server, one for the load")
    return usable[0], usable[1]


@contextlib.contextmanager
def load_core() -> Iterator[int]:
    """Keep this process, and the generators it starts, off the server's core; tells that core."""
    before = os.sched_getaffinity(0)
    server, load = cores()
    os.sched_setaffinity(0, {load})
    try:
        yield server
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    name: str
    pid: int
    host: str
    port: int
    started_seconds: float
    """From its start as a process until it said that it is ready."""

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    def resident_bytes(self) -> int:
        return _status(self.pid, "VmRSS")

    def peak_resident_bytes(self) -> int:
        return _status(self.pid, "VmHWM")

    def cpu_seconds(self) -> float:
        """Of all its threads, by the process's own clock: what /proc tells is counted in hundredths."""
        return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid(3) makes them


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no {field}")


def _ticks(path: str) -> float:
    """Processor time of a process, and of those of its children that have ended."""
    try:
        fields = Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def family_cpu_seconds(first: int) -> float:
    """Processor time of a process and its children, in hundredths."""
    total = _ticks(f"/proc/{first}/stat")
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                parent = int(Path(entry.path, "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == first:
                total += _ticks(f"{entry.path}/stat")
    return total


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory on the disk that is measured: durable writes mean nothing on a RAM disk."""
    with tempfile.TemporaryDirectory(prefix="fleetplane-bench-", dir=ROOT / "bench") as made:
        yield Path(made)


def secret_file(path: Path, text: str) -> Path:
    """A file that only its owner reads: servers refuse secrets on their command line."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    return path


@contextlib.contextmanager
def fleetplane(
    data_dir: Path, core: int | None, settings: Sequence[str] = (), *, domains: str = "gpus"
) -> Iterator[Server]:
    """The product as a user starts it, on free ports, with `key=value` settings.

    It runs the domain that is measured, as a node that needs no other would; empty runs them all.
    """
    ready = data_dir.with_name(data_dir.name + ".ready")
    command = [
        str(Path(sys.executable).with_name("fleetplane")),
        "server",
        "--data-dir",
        str(data_dir),
        "--ready-file",
        str(ready),
        "--log-level",
        "error",
        *(("--only", domains) if domains else ()),
    ]
    free = (f"listeners.{name}.addresses=127.0.0.1:0" for name in LISTENERS)
    for setting in (*free, "listeners.device-api.tcp_writes=true", *settings):
        command += ["--set", setting]
    with _running("fleetplane", command, ready, core) as server:
        yield server


@contextlib.contextmanager
def grpc_aio(directory: Path, core: int | None) -> Iterator[Server]:
    """The reference: `reference_server.py`."""
    ready = directory / "reference.ready"
    command = [sys.executable, "-m", "bench.reference_server", str(ready)]
    with _running("grpc.aio", command, ready, core) as server:
        yield server


@contextlib.contextmanager
def bare_streams(directory: Path, core: int | None) -> Iterator[Server]:
    """The transport with nothing behind it: `bare_streams.py`."""
    ready = directory / "bare.ready"
    with _running("bare", [sys.executable, "-m", "bench.bare_streams", str(ready)], ready, core) as server:
        yield server


@contextlib.contextmanager
def _running(
    name: str, command: Sequence[str], ready: Path, core: int | None, *, seconds: float = START_SECONDS
) -> Iterator[Server]:
    confined = ["taskset", "--cpu-list", str(core), *command] if core is not None else list(command)
    # Both servers report every stream that a departing client leaves behind. That is no news here.
    log = ready.with_suffix(".log")
    with log.open("wb") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(confined, cwd=ROOT, stdout=output, stderr=output)
    try:
        addresses = _await_ready(process, ready, log, seconds)
        started = time.perf_counter() - begun
        host, _, port = addresses[0].removeprefix("http://").rpartition(":")
        yield Server(name=name, pid=process.pid, host=host, port=int(port), started_seconds=started)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(process: subprocess.Popen[bytes], ready: Path, log: Path, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while not ready.exists():
        if process.poll() is not None:
            raise RuntimeError(f"a server ended instead of becoming ready:\n{log.read_text()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"a server was not ready within {seconds} s:\n{log.read_text()}")
        time.sleep(POLL_SECONDS)
    listeners: dict[str, list[str]] = json.loads(ready.read_text())["listeners"]
    return listeners.get("device-api") or listeners["web"]
