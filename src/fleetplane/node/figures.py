"""Telling the server what this agent measures, over the connection of its session.

A call of its own beside the domain's protocol. A server that does not know it is asked once for each
connection; one that refuses is asked again later. Nothing of the session depends on it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2 as pb
from fleetplane.gen.fleetplane.fleet.v1 import figures_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError
from fleetplane.node.connection import Metadata
from fleetplane.node.host import proc
from fleetplane.node.link import words

CALL_SECONDS: Final = 20.0
RETRY_SECONDS: Final = 30.0
"""After a report that failed, while the connection lasts."""
SHORTEST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 3600.0
"""Between reports, whatever the server says."""

Measured = Mapping[str, Mapping[str, float]]
"""By object, the empty name for the machine itself; then by name of the figure."""


class FigureReporter:
    """One for an agent's whole life."""

    def __init__(
        self,
        measure: Callable[[], Awaitable[Measured]],
        *,
        clock: Clock,
        log: Callable[[], Any],
        name: str = "",
    ) -> None:
        """`name` says who reports where no credential does; `log` is asked once logging is set up."""
        self._measure = measure
        self._clock = clock
        self._make_log = log
        self._name = name

    def __repr__(self) -> str:
        return f"<FigureReporter {self._name}>"

    async def follow(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        """Report over a connection for as long as it lasts. Raises nothing but cancellation."""
        log, stub = self._make_log(), figures_pb2_grpc.AgentFiguresStub(channel)
        while True:
            pause = RETRY_SECONDS
            try:
                request = await self._request()
                answer = await stub.Report(request, timeout=CALL_SECONDS, metadata=tuple(metadata()))
                pause = answer.next_seconds
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    log.info("figures_not_wanted")
                    return  # by this server; the next connection may be to another
                log.debug("figures_not_told", error=words(error))
            except (FleetplaneError, OSError) as error:
                log.debug("figures_not_read", error=str(error))
            # In this order, so that a pause which is no number is the longest.
            await self._clock.sleep(max(SHORTEST_SECONDS, min(LONGEST_SECONDS, pause)))

    async def _request(self) -> pb.ReportFiguresRequest:
        measured = await self._measure()
        objects = [pb.ObjectFigures(object=name, values=values) for name, values in measured.items()]
        return pb.ReportFiguresRequest(name=self._name, objects=objects)


class HostFigures:
    """Processor, memory, disk and load of this machine. Blocking, though never for long."""

    def __init__(self, folder: Path, root: Path = proc.ROOT) -> None:
        """`folder` lies on the disk that is told."""
        self._folder = folder
        self._root = root
        self._usage = proc.CpuUsage(root)
        self._usage.look()

    def __repr__(self) -> str:
        return f"<HostFigures {self._folder}>"

    def look(self) -> dict[str, float]:
        """What could be read; the processor's since the last look."""
        found: dict[str, float] = {}
        if (busy := self._usage.look().get("cpu")) is not None:
            found["cpuPercent"] = busy
        if (memory := proc.memory(self._root)) is not None:
            found["memoryPercent"] = memory.used_percent
        with suppress(OSError, ZeroDivisionError):
            disk = shutil.disk_usage(self._folder)
            found["diskPercent"] = 100.0 * disk.used / (disk.used + disk.free)
        with suppress(OSError):
            found["loadAverage"] = os.getloadavg()[0]
        return found
