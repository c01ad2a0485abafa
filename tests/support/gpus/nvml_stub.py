"""Drivers to test against: the compiled stub behind the real pynvml, and the simulated library."""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

from fleetplane.domains.gpus.agent.health import GpuUuid
from fleetplane.domains.gpus.agent.library import WATCHED_EVENTS, DriverEventKind, Library, NvmlLibrary
from fleetplane.domains.gpus.agent.simulated import SimulatedLibrary

SOURCE = Path(__file__).with_name("fake_nvml.c")
GIB = 1024**3
A100 = "NVIDIA A100-SXM4-40GB"
LOST = 15
NOT_SUPPORTED = 3


def compile_stub(driver_root: Path) -> None:
    """Put the stub where a driver root has the driver's library."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.fail("the driver stub needs gcc; install it with `apt-get install gcc libc6-dev`")
    target = driver_root / "usr" / "lib64" / "libnvidia-ml.so.1"
    target.parent.mkdir(parents=True)
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", str(target), str(SOURCE)], check=True)


def fresh_pynvml() -> ModuleType:
    """A copy of pynvml of its own: the module remembers the library it loaded first."""
    original = importlib.util.find_spec("pynvml")
    assert original is not None
    assert original.origin is not None
    name = f"pynvml_{secrets.token_hex(8)}"
    spec = importlib.util.spec_from_file_location(name, original.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pynvml looks itself up there while it is imported
    spec.loader.exec_module(module)
    return module


def uuid(index: int) -> GpuUuid:
    return GpuUuid(f"GPU-0000000{index}-1111-2222-3333-444444444444")


class FakeDriver:
    """Writes the files that the stub reads."""

    def __init__(self, folder: Path, driver_root: Path, *, gpus: int = 2) -> None:
        self.folder = folder
        self.driver_root = driver_root
        folder.mkdir(exist_ok=True)
        self.lines = [self.gpu(index) for index in range(gpus)]
        self._write()

    @staticmethod
    def gpu(
        index: int, *, name: str = "", mask: int = int(WATCHED_EVENTS), pending: int = 0, error: int = 0
    ) -> str:
        return f"{name or uuid(index)}|{A100}|{40 * GIB}|{mask}|{pending}|{error}"

    def set_gpu(
        self, index: int, *, name: str = "", mask: int = int(WATCHED_EVENTS), pending: int = 0, error: int = 0
    ) -> None:
        self.lines[index] = self.gpu(index, name=name, mask=mask, pending=pending, error=error)
        self._write()

    def remove_last(self) -> None:
        self.lines.pop()
        self._write()

    def event(self, index: int, kind: DriverEventKind, data: int = 0, *, instance: int = 0xFFFFFFFF) -> None:
        with (self.folder / "events").open("a") as events:
            events.write(f"{index} {int(kind)} {data} {instance}\n")

    def divide(self, *parts: tuple[int, int, str]) -> None:
        """MIG devices: index of the GPU, GPU instance, UUID."""
        lines = [
            f"{index}|{instance}|{name}|{A100} MIG 3g.20gb|{20 * GIB}\n" for index, instance, name in parts
        ]
        (self.folder / "mig").write_text("".join(lines))

    def fail_init(self, code: int) -> None:
        (self.folder / "init").write_text(str(code))

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().split() if path.exists() else []

    def _write(self) -> None:
        staged = self.folder / "gpus.new"
        staged.write_text("".join(f"{line}\n" for line in self.lines))
        staged.replace(self.folder / "gpus")  # the stub never sees half a file


class Rig(Protocol):
    """A library of two GPUs and the means to let things happen to them."""

    library: Library
    uuids: list[GpuUuid]

    def xid(self, index: int, number: int) -> None: ...

    def ecc(self, index: int) -> None: ...

    def lose(self, index: int) -> None: ...

    def retire_page(self, index: int) -> None: ...


class NvmlRig:
    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.library: Library = NvmlLibrary(fresh_pynvml(), driver_root=fake.driver_root)
        self.uuids = [uuid(0), uuid(1)]

    def xid(self, index: int, number: int) -> None:
        self.fake.event(index, DriverEventKind.XID, number)

    def ecc(self, index: int) -> None:
        self.fake.event(index, DriverEventKind.DOUBLE_BIT_ECC)

    def lose(self, index: int) -> None:
        self.fake.set_gpu(index, error=LOST)
        self.fake.event(-1, DriverEventKind.XID)

    def retire_page(self, index: int) -> None:
        self.fake.set_gpu(index, pending=1)


class SimulatedRig:
    def __init__(self) -> None:
        self.simulated = SimulatedLibrary(2, clock=time.monotonic, eventful=False)
        self.library: Library = self.simulated
        self.simulated.open()
        self.uuids = [device.uuid() for device in self.simulated.devices()]
        self.simulated.close()

    def xid(self, index: int, number: int) -> None:
        self.simulated.inject(self.uuids[index], xid=number)

    def ecc(self, index: int) -> None:
        self.simulated.inject(self.uuids[index], kind=DriverEventKind.DOUBLE_BIT_ECC)

    def lose(self, index: int) -> None:
        self.simulated.lose(self.uuids[index])

    def retire_page(self, index: int) -> None:
        self.simulated.retire_page(self.uuids[index])
