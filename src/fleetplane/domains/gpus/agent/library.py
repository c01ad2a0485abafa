"""What the provider needs of a GPU driver library, and that library as NVML gives it.

`Library`, `Device` and `EventSet` are the contract; `NvmlLibrary` keeps it with NVIDIA's own
`pynvml` module, `simulated.SimulatedLibrary` with none. All calls block and may be made from any
one thread at a time. This module translates; it decides nothing about health.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from fleetplane.domains.gpus.agent.health import GpuUuid
from fleetplane.kernel.errors import FleetplaneError, Unavailable, Unimplemented

LIBRARY_FILE = "libnvidia-ml.so.1"
LIBRARY_FOLDERS = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib",
    "lib64",
    "lib",
)
"""Where a driver root keeps the library, in the order they are tried."""


class DriverEventKind(IntFlag):
    SINGLE_BIT_ECC = 0x1
    DOUBLE_BIT_ECC = 0x2
    XID = 0x8
    MIG_CONFIG = 0x10


WATCHED_EVENTS = (
    DriverEventKind.SINGLE_BIT_ECC
    | DriverEventKind.DOUBLE_BIT_ECC
    | DriverEventKind.XID
    | DriverEventKind.MIG_CONFIG
)
NO_INSTANCE = 0xFFFFFFFF
"""In an event of a GPU as a whole."""


class DriverUnavailable(Unavailable):
    """The driver is not loaded or not reachable."""

    reason = "DRIVER_UNAVAILABLE"


class DriverError(FleetplaneError):
    """The driver answered with an error that says nothing more."""

    reason = "DRIVER_ERROR"


class GpuLost(DriverError):
    """A GPU is gone from the bus, or was powered off by a fault."""

    reason = "GPU_LOST"


class NotSupported(Unimplemented):
    """This GPU or driver does not know the question."""

    reason = "NOT_SUPPORTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEvent:
    uuid: GpuUuid | None
    """None when the driver could not say which GPU it was."""
    kind: DriverEventKind
    data: int
    """The XID, for an event of kind XID."""
    instance: int | None = None
    """The GPU instance that it is about, where the GPU is divided by MIG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where a MIG device belongs."""

    parent: GpuUuid
    instance: int


class Device(Protocol):
    def uuid(self) -> GpuUuid: ...

    def part_of(self) -> Part | None:
        """The GPU that a MIG device is a part of; None for a whole GPU."""
        ...

    def product(self) -> str: ...

    def memory_bytes(self) -> int: ...

    def retirement_pending(self) -> bool: ...

    def supported_events(self) -> DriverEventKind: ...

    def figures(self) -> Mapping[str, float]:
        """What it measures of itself now, without what it does not know. May be asked beside a wait."""
        ...


class EventSet(Protocol):
    def add(self, device: Device, kinds: DriverEventKind) -> None: ...

    def wait(self, timeout_milliseconds: int) -> DriverEvent | None:
        """The next event, or None when the time is up. Raises GpuLost when some GPU is gone."""
        ...

    def close(self) -> None:
        """Free the set. Not while another thread waits on it."""
        ...


class Library(Protocol):
    def open(self) -> None:
        """Load and initialise. Raises DriverUnavailable with words for the operator."""
        ...

    def close(self) -> None:
        """Undo `open`; harmless when not open."""
        ...

    def driver_version(self) -> str: ...

    def devices(self) -> Sequence[Device]:
        """A handle for every GPU that gives one, in index order, and for its MIG devices after it."""
        ...

    def event_set(self) -> EventSet: ...


def find_library(driver_root: Path) -> Path | None:
    """The library below a driver root such as /run/nvidia/driver, if it is there."""
    candidates = (driver_root / folder / LIBRARY_FILE for folder in LIBRARY_FOLDERS)
    return next((path for path in candidates if path.exists()), None)


class NvmlLibrary:
    """The real driver library, through `pynvml`.

    pynvml keeps the loaded library in a module global and has no argument for its path, so a
    driver root is honoured by putting the loaded library there before it is initialised. The
    module is an argument for the same reason: one module, one library.
    """

    def __init__(self, pynvml: ModuleType, *, driver_root: Path | None = None) -> None:
        self.nvml: Any = pynvml  # an untyped C binding: this class is where its values get types
        self._driver_root = driver_root
        self._open = False
        self._uuids: dict[int, GpuUuid] = {}

    def __repr__(self) -> str:
        return f"<NvmlLibrary {'open' if self._open else 'closed'} driver_root={self._driver_root}>"

    def open(self) -> None:
        found = find_library(self._driver_root) if self._driver_root is not None else None
        try:
            if found is not None:
                self.nvml.nvmlLib = ctypes.CDLL(str(found))
            self.nvml.nvmlInit()
        except OSError as error:
            raise DriverUnavailable(f"{found} cannot be loaded: {error}") from error
        except self.nvml.NVMLError as error:
            raise self._why_unavailable(error) from error
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._uuids.clear()
        with self.translated("shutting down"):
            self.nvml.nvmlShutdown()

    def driver_version(self) -> str:
        with self.translated("reading the driver version"):
            return str(self.nvml.nvmlSystemGetDriverVersion())

    def devices(self) -> Sequence[Device]:
        with self.translated("counting GPUs"):
            count = int(self.nvml.nvmlDeviceGetCount())
        found: list[Device] = []
        for index in range(count):
            try:
                handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
            except self.nvml.NVMLError:
                continue  # no handle, no name: there is nothing that could be reported of it
            whole = NvmlDevice(self, handle)
            found += [whole, *self._parts(whole)]
        return found

    def _parts(self, whole: NvmlDevice) -> Iterator[NvmlDevice]:
        try:
            count = int(self.nvml.nvmlDeviceGetMaxMigDeviceCount(whole.handle))
        except self.nvml.NVMLError:
            return  # a GPU or a driver without MIG
        for index in range(count):
            try:
                handle = self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole.handle, index)
            except self.nvml.NVMLError:
                continue  # there may be as many, and there are fewer
            yield NvmlDevice(self, handle, whole)

    def event_set(self) -> EventSet:
        with self.translated("creating an event set"):
            return NvmlEventSet(self, self.nvml.nvmlEventSetCreate())

    def uuid_of(self, handle: Any) -> GpuUuid:
        """The UUID behind a handle, from memory if it was ever read.

        Events come with a handle, and the GPU of the worst of them (fallen off the bus) no
        longer answers for its UUID.
        """
        key = ctypes.cast(handle, ctypes.c_void_p).value or 0
        if key not in self._uuids:
            with self.translated("reading a UUID"):
                self._uuids[key] = GpuUuid(str(self.nvml.nvmlDeviceGetUUID(handle)))
        return self._uuids[key]

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        nvml = self.nvml
        try:
            yield
        except nvml.NVMLError as error:
            match error.value:
                case nvml.NVML_ERROR_GPU_IS_LOST:
                    raise GpuLost(f"{doing}: {error}") from error
                case nvml.NVML_ERROR_NOT_SUPPORTED | nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise NotSupported(f"{doing}: {error}") from error
                case _:
                    raise DriverError(f"{doing}: {error}") from error

    def _why_unavailable(self, error: Any) -> DriverUnavailable:
        nvml = self.nvml
        match error.value:
            case nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
                where = f" below {self._driver_root} or" if self._driver_root is not None else ""
                return DriverUnavailable(
                    f"no NVIDIA driver: {LIBRARY_FILE} was not found{where} on the system's library path",
                    hint="install the NVIDIA driver, point --driver-root at it, or try --simulate 4",
                )
            case nvml.NVML_ERROR_DRIVER_NOT_LOADED:
                return DriverUnavailable(
                    "the NVIDIA kernel driver is not loaded",
                    hint="load it with `modprobe nvidia`, see `dmesg`",
                )
            case _:
                return DriverUnavailable(
                    f"NVML did not start: {error}", hint="see whether `nvidia-smi` works on this machine"
                )


class NvmlDevice:
    def __init__(self, library: NvmlLibrary, handle: Any, whole: NvmlDevice | None = None) -> None:
        self._library = library
        self.handle = handle
        self._whole = whole

    def uuid(self) -> GpuUuid:
        return self._library.uuid_of(self.handle)

    def part_of(self) -> Part | None:
        if self._whole is None:
            return None
        with self._library.translated("reading a GPU instance"):
            instance = int(self._library.nvml.nvmlDeviceGetGpuInstanceId(self.handle))
        return Part(parent=self._whole.uuid(), instance=instance)

    def product(self) -> str:
        with self._library.translated("reading a product name"):
            return str(self._library.nvml.nvmlDeviceGetName(self.handle))

    def memory_bytes(self) -> int:
        with self._library.translated("reading memory information"):
            return int(self._library.nvml.nvmlDeviceGetMemoryInfo(self.handle).total)

    def retirement_pending(self) -> bool:
        with self._library.translated("reading pending page retirement"):
            return bool(self._library.nvml.nvmlDeviceGetRetiredPagesPendingStatus(self.handle))

    def supported_events(self) -> DriverEventKind:
        if self._whole is not None:
            return DriverEventKind(0)  # the whole GPU has those of its parts
        with self._library.translated("reading supported events"):
            mask = int(self._library.nvml.nvmlDeviceGetSupportedEventTypes(self.handle))
        return DriverEventKind(mask & WATCHED_EVENTS)

    def figures(self) -> Mapping[str, float]:
        nvml, handle = self._library.nvml, self.handle

        def memory() -> float:
            told = nvml.nvmlDeviceGetMemoryInfo(handle)
            return 100.0 * float(told.used) / float(told.total)

        questions: Mapping[str, Callable[[], float]] = {
            "gpuPercent": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memoryPercent": memory,
            "temperatureCelsius": lambda: float(
                nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "powerWatts": lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000.0,
        }
        found: dict[str, float] = {}
        for name, ask in questions.items():
            with suppress(NotSupported, DriverError, ZeroDivisionError), self._library.translated(name):
                found[name] = ask()
        return found


class NvmlEventSet:
    def __init__(self, library: NvmlLibrary, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def add(self, device: Device, kinds: DriverEventKind) -> None:
        assert isinstance(device, NvmlDevice)
        with self._library.translated("registering for events"):
            self._library.nvml.nvmlDeviceRegisterEvents(device.handle, int(kinds), self._handle)

    def wait(self, timeout_milliseconds: int) -> DriverEvent | None:
        nvml = self._library.nvml
        with self._library.translated("waiting for events"):
            try:
                data = nvml.nvmlEventSetWait(self._handle, timeout_milliseconds)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_TIMEOUT:
                    return None
                raise
        try:
            uuid = self._library.uuid_of(data.device)
        except FleetplaneError:
            uuid = None
        instance = int(data.gpuInstanceId)
        return DriverEvent(
            uuid=uuid,
            kind=DriverEventKind(int(data.eventType) & WATCHED_EVENTS),
            data=int(data.eventData),
            instance=None if instance == NO_INSTANCE else instance,
        )

    def close(self) -> None:
        with self._library.translated("freeing an event set"):
            self._library.nvml.nvmlEventSetFree(self._handle)
