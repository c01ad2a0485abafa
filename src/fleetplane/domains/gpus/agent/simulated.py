"""A driver library with no hardware under it.

It keeps the same contract as the real one and passes the same tests. What its GPUs do follows
from the seed and the clock alone: each has its own schedule of XIDs, and a GPU that reported a
page retirement has it pending for a while. `inject`, `lose` and `restore` let a test play fate.
"""

from __future__ import annotations

import math
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetplane.domains.gpus.agent.health import GpuUuid
from fleetplane.domains.gpus.agent.library import (
    WATCHED_EVENTS,
    Device,
    DriverError,
    DriverEvent,
    DriverEventKind,
    EventSet,
    GpuLost,
    Part,
)

SIMULATED_GPUS_LIMIT = 1024
"""More GPUs than any machine has; the device API's own ceiling."""

PENDING_EVENTS_LIMIT = 256
"""Events nobody waits for. Drivers drop the oldest too."""

PRODUCT = "Simulated GPU"
MEMORY_BYTES = 80 * 1024**3
LOAD_SECONDS = 600.0
QUIET_SECONDS = 90.0
"""Mean time between two events of one GPU."""
RETIREMENT_SECONDS = 45.0
"""How long a retired page waits for its imaginary reset."""

XID_WEIGHTS = {13: 6, 31: 4, 43: 2, 48: 1, 63: 2, 74: 1, 79: 1, 94: 1}
"""Mostly the application's own faults, as in life."""
RETIRING_XIDS = frozenset({48, 63, 94})


@dataclass(slots=True, kw_only=True)
class SimulatedGpu:
    """One GPU's fate. It is itself the device handle that the library gives out."""

    identity: GpuUuid
    fate: random.Random
    clock: Callable[[], float]
    next_event_at: float
    lost: bool = False
    retirement_until: float = field(default=0.0)

    def uuid(self) -> GpuUuid:
        return self.identity

    def part_of(self) -> Part | None:
        return None

    def product(self) -> str:
        self._must_answer()
        return PRODUCT

    def memory_bytes(self) -> int:
        self._must_answer()
        return MEMORY_BYTES

    def retirement_pending(self) -> bool:
        self._must_answer()
        return self.clock() < self.retirement_until

    def supported_events(self) -> DriverEventKind:
        self._must_answer()
        return WATCHED_EVENTS

    def figures(self) -> Mapping[str, float]:
        """A load that comes and goes in ten minutes, and what follows from it."""
        self._must_answer()
        phase = int(self.identity[-4:], 16) / 0xFFFF
        busy = 0.5 + 0.5 * math.sin(2 * math.pi * (self.clock() / LOAD_SECONDS + phase))
        return {
            "gpuPercent": round(100.0 * busy, 1),
            "memoryPercent": round(20.0 + 60.0 * busy, 1),
            "temperatureCelsius": round(35.0 + 40.0 * busy, 1),
            "powerWatts": round(60.0 + 340.0 * busy, 1),
        }

    def due(self, now: float) -> DriverEvent | None:
        """The event that is due by `now`, if any; its successor is scheduled."""
        if self.lost or now < self.next_event_at:
            return None
        self.next_event_at += self.fate.expovariate(1 / QUIET_SECONDS)
        (xid,) = self.fate.choices(list(XID_WEIGHTS), weights=list(XID_WEIGHTS.values()))
        if xid in RETIRING_XIDS:
            self.retirement_until = now + RETIREMENT_SECONDS
        return DriverEvent(uuid=self.identity, kind=DriverEventKind.XID, data=xid)

    def _must_answer(self) -> None:
        if self.lost:
            raise GpuLost(f"{self.identity} is lost")


class SimulatedLibrary:
    """`count` GPUs that differ from each other and are the same in every run with this seed."""

    def __init__(
        self, count: int, *, clock: Callable[[], float], seed: int = 0, eventful: bool = True
    ) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._pending: deque[DriverEvent] = deque(maxlen=PENDING_EVENTS_LIMIT)
        self._announce_loss = False
        self._open = False
        self._gpus = [self._make(index, seed, eventful) for index in range(min(count, SIMULATED_GPUS_LIMIT))]

    def __repr__(self) -> str:
        return f"<SimulatedLibrary gpus={len(self._gpus)} pending={len(self._pending)}>"

    def open(self) -> None:
        self._open = True

    def close(self) -> None:
        self._open = False

    def driver_version(self) -> str:
        self._must_be_open()
        return "simulated"

    def devices(self) -> Sequence[Device]:
        self._must_be_open()
        return list(self._gpus)

    def event_set(self) -> EventSet:
        self._must_be_open()
        return SimulatedEventSet(self)

    def inject(
        self, identity: GpuUuid | None, *, xid: int | None = None, kind: DriverEventKind = DriverEventKind.XID
    ) -> None:
        """Let an event happen now."""
        with self._changed:
            self._pending.append(DriverEvent(uuid=identity, kind=kind, data=xid or 0))
            self._changed.notify_all()

    def retire_page(self, identity: GpuUuid) -> None:
        self._gpu(identity).retirement_until = self._clock() + RETIREMENT_SECONDS

    def lose(self, identity: GpuUuid) -> None:
        """The GPU falls off the bus."""
        with self._changed:
            self._gpu(identity).lost = True
            self._announce_loss = True
            self._changed.notify_all()

    def remove(self, identity: GpuUuid) -> None:
        """The next enumeration does not see the GPU any more."""
        with self._changed:
            self._gpus = [gpu for gpu in self._gpus if gpu.identity != identity]

    def next_event(
        self, timeout_seconds: float, watched: dict[GpuUuid, DriverEventKind]
    ) -> DriverEvent | None:
        """Block until an event of a watched GPU, or until the time is up."""
        deadline = self._clock() + timeout_seconds
        with self._changed:
            while True:
                if self._announce_loss:
                    self._announce_loss = False
                    raise GpuLost("waiting for events: a GPU is lost")
                event = self._take(watched)
                if event is not None:
                    return event
                if self._clock() >= deadline:
                    return None
                coming = [gpu.next_event_at for gpu in self._gpus if not gpu.lost]
                self._changed.wait(max(0.0, min([deadline, *coming]) - self._clock()))

    def _take(self, watched: dict[GpuUuid, DriverEventKind]) -> DriverEvent | None:
        now = self._clock()
        self._pending.extend(event for gpu in self._gpus if (event := gpu.due(now)) is not None)
        while self._pending:
            event = self._pending.popleft()
            if event.uuid is None or event.kind & watched.get(event.uuid, DriverEventKind(0)):
                return event
        return None

    def _make(self, index: int, seed: int, eventful: bool) -> SimulatedGpu:
        fate = random.Random(f"{seed}/{index}")  # noqa: S311  # a fate, not a secret
        identity = GpuUuid(f"GPU-{uuid.UUID(int=fate.getrandbits(128), version=4)}")
        first = self._clock() + fate.expovariate(1 / QUIET_SECONDS) if eventful else float("inf")
        return SimulatedGpu(identity=identity, fate=fate, clock=self._clock, next_event_at=first)

    def _gpu(self, identity: GpuUuid) -> SimulatedGpu:
        return next(gpu for gpu in self._gpus if gpu.identity == identity)

    def _must_be_open(self) -> None:
        if not self._open:
            raise DriverError("the simulated library is not open")


class SimulatedEventSet:
    def __init__(self, library: SimulatedLibrary) -> None:
        self._library = library
        self._watched: dict[GpuUuid, DriverEventKind] = {}

    def add(self, device: Device, kinds: DriverEventKind) -> None:
        self._watched[device.uuid()] = kinds

    def wait(self, timeout_milliseconds: int) -> DriverEvent | None:
        return self._library.next_event(timeout_milliseconds / 1000, self._watched)

    def close(self) -> None:
        self._watched.clear()
