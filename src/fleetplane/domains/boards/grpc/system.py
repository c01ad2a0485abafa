"""The methods of `pi_controller.PiControllerService` about the server itself, and the agents' heartbeat."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import resource
from collections.abc import AsyncIterator

import psutil

from fleetplane.domains.boards.grpc.nodes import Callers
from fleetplane.domains.boards.inventory.boards import Boards
from fleetplane.domains.boards.inventory.liveness import BoardController, Word
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.metrics import history
from fleetplane.domains.boards.ports import MetricsIntake
from fleetplane.fleet.streams.presence import closed_error, until_closed
from fleetplane.gen.pi_controller import pi_controller_pb2 as pi
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import InvalidArgument, NotFound, PermissionDenied
from fleetplane.kernel.sessions import Session, Sessions
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext

METRICS_STREAM = "metrics"


def memory_info() -> pi.MemoryInfo:
    """The process's memory under another runtime's names: `total_alloc` is its peak, heap what is its own."""
    memory = psutil.Process().memory_info()
    own, data = memory.rss - memory.shared, memory.data
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return pi.MemoryInfo(
        alloc=memory.rss,
        total_alloc=max(peak, memory.rss),
        sys=memory.vms,
        heap_alloc=own,
        heap_sys=max(data, own),
        heap_inuse=own,
        heap_idle=max(data - own, 0),
        heap_objects=sum(gc.get_count()),
    )


class SystemMethods:
    def __init__(
        self,
        *,
        boards: Boards,
        callers: Callers,
        controller: BoardController,
        intake: MetricsIntake,
        sessions: Sessions,
        clock: Clock,
        version: str,
    ) -> None:
        self._boards = boards
        self._callers = callers
        self._controller = controller
        self._intake = intake
        self._sessions = sessions
        self._clock = clock
        self._version = version
        self._started = clock.monotonic()

    async def Health(self, _request: pi.HealthRequest, context: CallContext) -> pi.HealthResponse:
        """Reports the server's health; a call counts as a sign of life of its caller."""
        number = self._callers.itself(context)
        if number is not None and self._boards.get(number) is not None:
            await self._controller.heard(number, Word(), actor=context.principal.name)
        return pi.HealthResponse(
            status="ok",
            timestamp=timestamp(self._clock.now_ns()),
            version=self._version,
            uptime=self._uptime(),
        )

    async def GetSystemInfo(
        self, _request: pi.SystemInfoRequest, _context: CallContext
    ) -> pi.SystemInfoResponse:
        """The fields are named for another runtime; ours answers with what comes nearest."""
        return pi.SystemInfoResponse(
            go_version=f"python {platform.python_version()}",
            go_os=platform.system().lower(),
            go_arch=platform.machine(),
            cpu_count=os.cpu_count() or 0,
            goroutines=len(asyncio.all_tasks()),
            memory=memory_info(),
            gc=pi.GCInfo(num_gc=sum(generation["collections"] for generation in gc.get_stats())),
            timestamp=timestamp(self._clock.now_ns()),
            uptime=self._uptime(),
        )

    async def StreamAgentMetrics(
        self, requests: AsyncIterator[pi.AgentMetricsRequest], context: CallContext
    ) -> pi.StreamAgentMetricsResponse:
        identity = credentials.presented(context.connection)
        first = await anext(requests, None)
        if first is None:
            return pi.StreamAgentMetricsResponse(success=True, message="no samples")
        number = self._board_of(first, context)
        session: Session[None] = self._sessions.open(
            str(number),
            METRICS_STREAM,
            limit=1,
            principal=context.principal.name,
            serial=identity.serial if identity is not None else None,
        )
        with session:
            async with until_closed(session):
                taken = await self._take_all(number, first, requests, context)
                return pi.StreamAgentMetricsResponse(success=True, message=f"{taken} samples")
        raise closed_error(session)

    async def _take_all(
        self,
        number: int,
        first: pi.AgentMetricsRequest,
        requests: AsyncIterator[pi.AgentMetricsRequest],
        context: CallContext,
    ) -> int:
        await self._take(number, first, context)
        taken = 1
        async for request in requests:
            if self._board_of(request, context) != number:
                raise InvalidArgument("node_id changed within the stream", field="node_id")
            await self._take(number, request, context)
            taken += 1
        return taken

    async def _take(self, number: int, request: pi.AgentMetricsRequest, context: CallContext) -> None:
        await self._controller.heard(number, Word(), actor=context.principal.name)
        if request.HasField("metrics"):
            self._intake.metrics(number, history.of_nested(request.metrics, at_ns=self._clock.now_ns()))

    def _board_of(self, request: pi.AgentMetricsRequest, context: CallContext) -> int:
        """By number or by name, or as the connection has it."""
        said = request.node_id
        if not said:
            return self._callers.speaking_for(context, 0, field="node_id")
        if said.isascii() and said.isdecimal() and len(said) <= 10:
            return self._callers.speaking_for(context, int(said), field="node_id")
        board = self._boards.holder("name", said)
        if board is None:
            if credentials.board_of(context.principal) is not None:
                raise PermissionDenied("node_id is not that of the certificate", field="node_id")
            raise NotFound(f"no board is named {said[:64]!r}", field="node_id")
        return self._callers.speaking_for(context, int(board.name), field="node_id")

    def _uptime(self) -> str:
        seconds = int(self._clock.monotonic() - self._started)
        hours, minutes = seconds // 3600, seconds // 60 % 60
        return f"{hours}h{minutes}m{seconds % 60}s" if hours else f"{minutes}m{seconds % 60}s"
