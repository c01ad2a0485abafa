"""REST: the server itself, as clients of boards know it."""

from __future__ import annotations

import asyncio
import gc
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psutil

from fleetplane.domains.boards.access import READ
from fleetplane.domains.boards.rest import BoardCall, Json
from fleetplane.kernel.clock import Clock
from fleetplane.web.gateway import Receive, Scope, Send
from fleetplane.web.routes import Answer, Route
from fleetplane.web.times import spelled

_TAG = "System"
IsReady = Callable[[], bool]


class SystemRoutes:
    def __init__(self, clock: Clock, *, is_writable: IsReady) -> None:
        self._clock = clock
        self._started = clock.monotonic()
        self._is_writable = is_writable

    def routes(self) -> Sequence[Route]:
        return (
            Route(
                method="GET", path="/health", handler=self.health, tag=_TAG, public=True,
                summary="Is the server there", answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/system/info", handler=self.info, tag=_TAG, permission=READ,
                summary="What the server runs on", answer=dict[str, Any],
            ),
            Route(
                method="GET", path="/system/metrics", handler=self.metrics, tag=_TAG, permission=READ,
                summary="What the server takes", answer=dict[str, Any],
            ),
        )  # fmt: skip

    async def health(self, _call: BoardCall) -> Answer[Json]:
        return Answer(content=self.health_now())

    def health_now(self) -> Json:
        return {"status": "ok", "timestamp": spelled(self._clock.now_ns()), "uptime": self._uptime()}

    def ready_now(self) -> tuple[int, Json]:
        ready = self._is_writable()
        told = {
            "status": "ready" if ready else "not_ready",
            "timestamp": spelled(self._clock.now_ns()),
            "services": {"database": "healthy" if ready else "not writable"},
        }
        return (200 if ready else 503), told

    async def info(self, _call: BoardCall) -> Answer[Json]:
        """The names are another runtime's; ours answers with what comes nearest."""
        memory = psutil.Process().memory_info()
        return Answer(
            content={
                "go_version": f"python {platform.python_version()}",
                "go_os": platform.system().lower(),
                "go_arch": platform.machine(),
                "cpu_count": os.cpu_count() or 0,
                "goroutines": len(asyncio.all_tasks()),
                "memory": {"alloc": memory.rss, "sys": memory.vms, "heap_objects": sum(gc.get_count())},
                "gc": {"num_gc": _collections(), "pause_total": 0, "last_gc": None},
                "timestamp": spelled(self._clock.now_ns()),
                "uptime": self._uptime(),
            }
        )

    async def metrics(self, _call: BoardCall) -> Answer[Json]:
        memory = psutil.Process().memory_info()
        return Answer(
            content={
                "uptime_seconds": round(self._clock.monotonic() - self._started, 3),
                "goroutines_count": len(asyncio.all_tasks()),
                "memory_alloc": memory.rss,
                "memory_sys": memory.vms,
                "gc_count": _collections(),
                "gc_pause_total_ns": 0,
                "timestamp": self._clock.now_ns() // 1_000_000_000,
            }
        )

    def _uptime(self) -> str:
        seconds = int(self._clock.monotonic() - self._started)
        return f"{seconds // 3600}h{seconds // 60 % 60}m{seconds % 60}s"


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


class Probes:
    """`/health` and `/ready` without a prefix, where known clients look for them. A bare ASGI application."""

    def __init__(self, system: SystemRoutes) -> None:
        self._system = system

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, told = (200, self._system.health_now())
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
