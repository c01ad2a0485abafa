"""The web listener's application: `/healthz`, `/livez`, `/readyz`, `/metrics`, the index at `/`, and mounts.

A bare ASGI application: these must answer while everything else is starting, drowning or going down.
Requests below the path of a mounted application are passed on to it. `OwnerSocket` is the same at the
owner's socket, beside gRPC: reaching the socket is the credential, a request that is not gRPC gets a token
of the owner's principal, kept in this process, and a credential in the request is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry

from fleetplane.rpc import Needs
from fleetplane.web.metrics_page import MetricsAnswer, MetricsPage

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TEXT = "text/plain; charset=utf-8"
INDEX = {
    "/healthz": "is the process alive",
    "/readyz": "will it take calls",
    "/metrics": "its numbers, for Prometheus",
}


CONSOLE = "/ui"
"""Where `/` leads browsers, if it is mounted; programs are told what there is."""

READS = "/readyz/reads"
"""For balancers that spread reads: a server that stands by is ready for them, and not for everything."""

READS_ONLY = "fleetplane.reads_only"
"""The key in an ASGI scope, on a server that stands by, of what makes the refusal of everything but reads."""

App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """An ASGI application for one path and everything below it, over HTTP and WebSocket."""

    path: str
    app: App
    summary: str = ""
    """What is there, for people; empty for what they need not know of."""
    is_page: bool = False
    """Something to open in a browser: the console leads there."""
    needs: Needs = Needs.ACTIVE
    """The least that something of it needs. An application that has reads beside other things refuses those
    itself where the scope has `READS_ONLY`."""
    listed: Callable[[], bool] = lambda: True
    """Whether people are told of it now: a server that stands by may answer nothing of it."""


class Readiness(StrEnum):
    STARTING = "not ready"
    READY = "ok"
    STANDBY = "stands by"
    DRAINING = "shutting down"


class OpsApp:
    def __init__(
        self, registry: CollectorRegistry, *, version: str, metrics: MetricsPage | None = None
    ) -> None:
        self._metrics = metrics or MetricsPage(registry)
        self._version = version
        self._mounts: list[Mount] = []
        self.readiness = Readiness.STARTING
        self.reads: Callable[[], bool] = bool
        """Whether reads are answered although the server is not ready for everything."""
        self.elsewhere: Callable[[], str] = str
        """Why what is not mounted is asked of the wrong server; empty if there is no such thing at all."""
        self.trouble: Callable[[], str] = str
        """Why a server that is up will not take calls all the same, in a few words; empty if it will."""

    def mount(self, mounts: Iterable[Mount]) -> None:
        """Pass on what lies at or below these paths; the longest that fits decides."""
        self._mounts = sorted((*self._mounts, *mounts), key=lambda mount: -len(mount.path))

    def _mounted(self, path: str) -> App | None:
        for mount in self._mounts:
            if path == mount.path or path.startswith(mount.path + "/"):
                return mount.app
        return None

    def handler_name(self, scope: Scope) -> str:
        """What serves a request that no route has named: a mount, or this application itself."""
        path = scope["path"]
        if path in INDEX:
            return str(path)
        return next((f"web {one.path}" for one in self._mounts if path.startswith(one.path)), "web")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (app := self._mounted(scope["path"])) is not None:
            await app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        if scope["path"] == "/metrics" and scope["method"] in ("GET", "HEAD"):
            await self._tell_metrics(scope, send)
            return
        await _send(scope, send, *self._answer(scope))

    async def _tell_metrics(self, scope: Scope, send: Send) -> None:
        async def tell(answer: MetricsAnswer) -> None:
            extra = []
            if answer.retry_seconds:
                extra.append((b"retry-after", str(answer.retry_seconds).encode()))
            if answer.status == 401:
                extra.append((b"www-authenticate", b'Bearer realm="metrics"'))
            await _send(scope, send, answer.status, answer.content_type, answer.body, extra)

        client = scope.get("client") or ("", 0)
        await self._metrics.answer(
            str(client[0]),
            _header(scope, b"accept"),
            _header(scope, b"authorization"),
            tell,
            host=_header(scope, b"host") if client[0] else "",  # no page of a browser reaches a Unix socket
        )

    def _answer(self, scope: Scope) -> tuple[int, str, bytes, list[tuple[bytes, bytes]]]:
        if scope["path"] not in ("/", "/livez", READS, *INDEX):
            if elsewhere := self.elsewhere():
                return _problem(503, "STANDS_BY", elsewhere)
            return _problem(404, "NOT_FOUND", f"there is nothing at {scope['path']}")
        if scope["method"] not in ("GET", "HEAD"):
            return _problem(
                405,
                "METHOD_NOT_ALLOWED",
                f"{scope['method']} is not allowed here",
                [(b"allow", b"GET, HEAD")],
            )
        match scope["path"]:
            case "/healthz" | "/livez":
                return 200, TEXT, b"ok\n", []
            case "/readyz/reads" if self.reads():
                return 200, TEXT, b"ok\n", []
            case "/readyz" | "/readyz/reads":
                ready = self.readiness is Readiness.READY
                if ready and (trouble := self.trouble()):
                    return 503, TEXT, f"{trouble}\n".encode(), []
                return 200 if ready else 503, TEXT, f"{self.readiness}\n".encode(), []
            case _:
                shown = [mount for mount in reversed(self._mounts) if mount.listed()]
                vary = (b"vary", b"accept")
                if "text/html" in _header(scope, b"accept") and any(one.path == CONSOLE for one in shown):
                    return 302, TEXT, b"", [(b"location", f"{CONSOLE}/".encode()), vary]
                told = {mount.path: mount.summary for mount in shown if mount.summary}
                pages = [mount.path for mount in shown if mount.is_page]
                page = {
                    "product": "fleetplane",
                    "version": self._version,
                    "paths": INDEX | told,
                    "pages": pages,
                }
                return 200, "application/json", json.dumps(page, indent=2).encode() + b"\n", [vary]


async def _send(
    scope: Scope, send: Send, status: int, content_type: str, body: bytes, extra: list[tuple[bytes, bytes]]
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _header(scope: Scope, wanted: bytes) -> str:
    value: bytes = next((value for name, value in scope["headers"] if name == wanted), b"")
    return value.decode("latin-1")


def _problem(
    status: int, code: str, message: str, headers: list[tuple[bytes, bytes]] | None = None
) -> tuple[int, str, bytes, list[tuple[bytes, bytes]]]:
    body = json.dumps({"error": {"code": code, "message": message}}).encode() + b"\n"
    return status, "application/json", body, headers or []


GRPC = b"application/grpc"
CREDENTIALS = frozenset({b"authorization", b"cookie"})


class OwnerSocket:
    """Passes gRPC to one application and the rest, as the owner, to another."""

    def __init__(self, grpc: Callable[[Any, Any, Any], Awaitable[None]], web: OpsApp, *, token: str) -> None:
        self._grpc = grpc
        self._web = web
        self._credential = b"Bearer " + token.encode()
        self._grpc_name: Callable[[Scope], str] = getattr(grpc, "handler_name", lambda _scope: "")

    def __repr__(self) -> str:
        return f"<OwnerSocket {self._grpc!r}>"

    def handler_name(self, scope: Scope) -> str:
        """What serves a request, for the watchdog."""
        return self._grpc_name(scope) if _is_grpc(scope) else self._web.handler_name(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not _is_grpc(scope):
            headers = [(name, value) for name, value in scope["headers"] if name not in CREDENTIALS]
            headers.append((b"authorization", self._credential))
            await self._web({**scope, "headers": headers}, receive, send)
            return
        await self._grpc(scope, receive, send)


def _is_grpc(scope: Scope) -> bool:
    return any(name == b"content-type" and value.startswith(GRPC) for name, value in scope.get("headers", ()))
