"""REST: the server itself, as clients of boards know it."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
from collections.abc import Callable, Sequence

import msgspec
import psutil

from fleetplane.domains.boards.access import READ
from fleetplane.domains.boards.grpc.system import memory_info
from fleetplane.domains.boards.inventory.last_seen import ServiceReports
from fleetplane.domains.boards.rest.common import BoardCall, spelled_as
from fleetplane.domains.boards.rest.shapes.people import (
    ServedBy,
    ServerCollections,
    ServerHealth,
    ServerInfo,
    ServerMemory,
    ServerMetrics,
    ServerReadiness,
    ServiceCheck,
    ServiceList,
    ShownService,
)
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.values.times import spelled
from fleetplane.rpc import Needs
from fleetplane.web.rest.gateway import Receive, Scope, Send
from fleetplane.web.rest.routes import Answer, Route, RouteGroup

_ROUTES = RouteGroup("System")
IsReady = Callable[[], bool]


class SystemRoutes:
    def __init__(self, clock: Clock, *, is_writable: IsReady, services: ServiceReports) -> None:
        self._services = services
        self._clock = clock
        self._started = clock.monotonic()
        self._is_writable = is_writable

    def routes(self) -> Sequence[Route]:
        return (
            _ROUTES.get("/health", self.health, public=True, needs=Needs.NOTHING),
            _ROUTES.get("/system/info", self.info, READ),
            _ROUTES.get("/system/metrics", self.metrics, READ),
            _ROUTES.get("/system/services", self.services, READ),
        )

    async def health(self, _call: BoardCall) -> Answer[ServerHealth]:
        """Liveness of the server."""
        return Answer(content=self.health_now())

    def health_now(self) -> ServerHealth:
        return ServerHealth(status="ok", timestamp=spelled(self._clock.now_ns()), uptime=self._uptime())

    def ready_now(self) -> tuple[int, ServerReadiness]:
        ready = self._is_writable()
        told = ServerReadiness(
            status="ready" if ready else "not_ready",
            timestamp=spelled(self._clock.now_ns()),
            services=ServedBy(database="healthy" if ready else "not writable"),
        )
        return (200 if ready else 503), told

    async def info(self, _call: BoardCall) -> Answer[ServerInfo]:
        """Get version and host of the server.

        The names are another runtime's; ours answers with what comes nearest.
        """
        return Answer(
            content=ServerInfo(
                go_version=f"python {platform.python_version()}",
                go_os=platform.system().lower(),
                go_arch=platform.machine(),
                cpu_count=os.cpu_count() or 0,
                goroutines=len(asyncio.all_tasks()),
                memory=spelled_as(memory_info(), ServerMemory),
                gc=ServerCollections(num_gc=_collections(), pause_total=0, last_gc=None),
                timestamp=spelled(self._clock.now_ns()),
                uptime=self._uptime(),
            )
        )

    async def metrics(self, _call: BoardCall) -> Answer[ServerMetrics]:
        """Get CPU and memory use of the server."""
        memory = psutil.Process().memory_info()
        return Answer(
            content=ServerMetrics(
                uptime_seconds=round(self._clock.monotonic() - self._started, 3),
                goroutines_count=len(asyncio.all_tasks()),
                memory_alloc=memory.rss,
                memory_sys=memory.vms,
                gc_count=_collections(),
                gc_pause_total_ns=0,
                timestamp=self._clock.now_ns() // 1_000_000_000,
            )
        )

    async def services(self, _call: BoardCall) -> Answer[ServiceList]:
        """List the health that services reported with ReportHealth."""
        found = [
            ShownService(
                service=one.service,
                reported_by=one.reporter,
                checks=[
                    ServiceCheck(name=check.type, status=check.status, message=check.message)
                    for check in one.conditions
                ],
                timestamp=spelled(one.at_ns),
            )
            for one in self._services.all()
        ]
        return Answer(content=ServiceList(services=found, count=len(found)))

    def _uptime(self) -> str:
        seconds = int(self._clock.monotonic() - self._started)
        return f"{seconds // 3600}h{seconds // 60 % 60}m{seconds % 60}s"


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


class ProbeRoutes:
    """`/health` and `/ready` without a prefix, where known clients look for them. A bare ASGI application."""

    def __init__(self, system: SystemRoutes) -> None:
        self._system = system

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status: int
        told: ServerHealth | ServerReadiness | dict[str, str]
        status, told = 200, self._system.health_now()
        if scope["method"] not in ("GET", "HEAD"):
            status, told = 405, {"error": "Method Not Allowed", "message": "only GET is allowed here"}
        elif scope["path"] == "/ready":
            status, told = self._system.ready_now()
        elif scope["path"] != "/health":
            status, told = 404, {"error": "Not Found", "message": f"there is nothing at {scope['path']}"}
        body = msgspec.json.encode(told) + b"\n"
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
