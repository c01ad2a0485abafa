"""Resident memory of each idle agent, and what of it is imports, by library.

python bench/agent_memory.py [--settle SECONDS]

Starts what `make run` starts, waits until every agent is connected and has been idle for a while, and reads
its memory. Beside that, each agent's modules are imported in a process of their own, and what each library
adds is noted: a library's share includes what it loads that nobody loaded before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
AGENTS = ("instance", "proxy", "edge", "gpu", "board")
WAIT_SECONDS = 90.0
SETTLE_SECONDS = 30.0

BY_LIBRARY = """
import builtins, json, os, sys

PAGE = os.sysconf("SC_PAGE_SIZE")
def resident():
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE

shares, stack, original = {"interpreter": resident()}, [], builtins.__import__
def group(name):
    top = name.partition(".")[0]
    if top == "fleetplane":
        return "contracts" if name.startswith("fleetplane.gen") else "fleetplane"
    if top in ("cryptography", "_cffi_backend"):
        return "cryptography"
    if top in ("google", "grpc", "structlog", "msgspec", "yaml", "click", "psutil", "prometheus_client",
               "h2corn", "crossplane", "rich", "gpiod", "pygments", "asyncio", "ssl", "importlib", "email"):
        if top == "importlib":
            return "importlib.metadata" if name.startswith("importlib.metadata") else "standard library"
        return {"google": "protobuf", "email": "importlib.metadata"}.get(top, top)
    return "standard library" if top in sys.stdlib_module_names else top

class Watch:
    # Notes the memory before and after each module's own execution, less what it imported meanwhile.
    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = Timed(spec.loader, name)
        return spec

class Timed:
    def __init__(self, inner, name):
        self._inner, self._name = inner, name
    def __getattr__(self, name):
        return getattr(self._inner, name)
    def create_module(self, spec):
        self._begin = resident()
        return self._inner.create_module(spec)
    def exec_module(self, module):
        begin = getattr(self, "_begin", resident())
        stack.append(0)
        try:
            self._inner.exec_module(module)
        finally:
            whole = resident() - begin
            own = whole - stack.pop()
            if stack:
                stack[-1] += whole
            key = group(self._name)
            shares[key] = shares.get(key, 0) + own
            module.__spec__.loader = module.__loader__ = self._inner

sys.meta_path.insert(0, Watch())
import fleetplane.cli.main
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
shares["all imports"] = resident()
print(json.dumps(shares))
"""


def by_library(agent: str) -> Mapping[str, int]:
    """Bytes that each library added while the agent's verb and composition root were imported."""
    from fleetplane.domains import discovery

    domain, verb = next(
        (declaration, verb)
        for declaration in discovery.installed().declarations
        for verb in declaration.agents
        if verb.name == agent
    )
    package = domain.server.rpartition(".")[0]
    whole = [f"{package}.agent.root"]
    if (ROOT / "src" / package.replace(".", "/") / "agent" / "assembly.py").exists():
        whole.append(f"{package}.agent.assembly")
    done = subprocess.run(
        [sys.executable, "-c", BY_LIBRARY, verb.target.partition(":")[0], *whole],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@contextmanager
def everything(data: Path) -> Iterator[None]:
    """What `make run` starts, on free ports."""
    from fleetplane.environment import PREFIX
    from fleetplane.settings import known_keys

    anywhere = {
        PREFIX + key.upper().replace(".", "__").replace("-", "_"): "127.0.0.1:0"
        for key, _ in known_keys()
        if key.startswith("listeners.") and key.endswith(".addresses")
    }
    anywhere[PREFIX + "LISTENERS__DEVICE_API__ADDRESSES"] = f"unix://{data}/device.sock,127.0.0.1:0"
    with (data.parent / "log").open("wb") as log:
        script = subprocess.Popen(
            [BIN / "fleetplane", "demo"],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **anywhere, "FLEETPLANE_DATA_DIR": str(data)},
        )
    try:
        yield
    finally:
        script.terminate()
        script.wait(WAIT_SECONDS)


def agents_of(data: Path) -> dict[str, int]:
    """Process ids of running agents by name; of several with one name, the first."""
    found: dict[str, int] = {}
    for entry in sorted(
        (path for path in Path("/proc").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    ):
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"agent" in command and str(data).encode() in b" ".join(command) + environment:
            name = command[command.index(b"agent") + 1].decode()
            if name in AGENTS and not {b"enroll", b"join"} & set(command):
                found.setdefault(name, int(entry.name))
    return found


def memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes, and those that are this process's alone."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    return found["Rss"], found["Private_Clean"] + found["Private_Dirty"]


def measured(settle_seconds: float) -> dict[str, tuple[int, int]]:
    with tempfile.TemporaryDirectory(prefix="fp-mem-") as folder:
        data = Path(folder) / "data"
        with everything(data):
            deadline = time.monotonic() + WAIT_SECONDS
            while len(agents_of(data)) < len(AGENTS) and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(settle_seconds)
            return {name: memory_of(pid) for name, pid in agents_of(data).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--settle", type=float, default=SETTLE_SECONDS, help="seconds of idleness before reading"
    )
    parser.add_argument("--imports-only", action="store_true", help="start nothing; measure imports alone")
    options = parser.parse_args()
    idle = {} if options.imports_only else measured(options.settle)
    shares = {agent: by_library(agent) for agent in AGENTS}
    rows = sorted({row for found in shares.values() for row in found} - {"all imports", "interpreter"})
    print("| MB | " + " | ".join(AGENTS) + " |")
    print("|---|" + "---|" * len(AGENTS))
    for row in ("interpreter", *rows, "all imports"):
        print(f"| {row} | " + " | ".join(_megabytes(shares[agent].get(row)) for agent in AGENTS) + " |")
    if idle:
        for place, words in enumerate(("idle and connected", "of which its own")):
            cells = (_megabytes(idle[agent][place] if agent in idle else None) for agent in AGENTS)
            print(f"| {words} | " + " | ".join(cells) + " |")


def _megabytes(size: int | None) -> str:
    return "–" if size is None or size < 50_000 else f"{size / 1e6:.1f}"


if __name__ == "__main__":
    main()
