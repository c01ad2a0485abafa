"""The operator's end of the web listener: `/healthz`, `/livez`, `/readyz`, `/metrics`; and `/ui/`.

A bare ASGI application: these must answer while everything else is starting, drowning
or going down. It is also the listener's front door: what other applications were mounted here
is passed on to them.
"""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TEXT = "text/plain; charset=utf-8"
HTML = "text/html; charset=utf-8"
PAGES = ("/ui", "/ui/")
NO_SCRIPT = (b"content-security-policy", b"default-src 'none'; base-uri 'none'; frame-ancestors 'none'")
INDEX = {
    "/healthz": "is the process alive",
    "/readyz": "will it take calls",
    "/metrics": "its numbers, for Prometheus",
}


App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """An ASGI application for one path and everything below it, over HTTP and WebSocket."""

    path: str
    app: App
    summary: str = ""
    """What is there, for people; empty for what they need not know of."""
    is_page: bool = False
    """Something to open in a browser: `/ui/` leads there."""


class Readiness(StrEnum):
    STARTING = "not ready"
    READY = "ok"
    DRAINING = "shutting down"


class OpsApp:
    def __init__(self, registry: CollectorRegistry, *, version: str) -> None:
        self._registry = registry
        self._version = version
        self._mounts: list[Mount] = []
        self.readiness = Readiness.STARTING

    def mount(self, mounts: Iterable[Mount]) -> None:
        """Pass on what lies at or below these paths; the longest that fits decides."""
        self._mounts = sorted((*self._mounts, *mounts), key=lambda mount: -len(mount.path))

    def _mounted(self, path: str) -> App | None:
        for mount in self._mounts:
            if path == mount.path or path.startswith(mount.path + "/"):
                return mount.app
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (app := self._mounted(scope["path"])) is not None:
            await app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        status, content_type, body, extra = self._answer(scope)
        headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            (b"x-content-type-options", b"nosniff"),
            *extra,
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Scope) -> tuple[int, str, bytes, list[tuple[bytes, bytes]]]:
        if scope["path"] not in ("/", "/livez", *PAGES, *INDEX):
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
            case "/readyz":
                ready = self.readiness is Readiness.READY
                return 200 if ready else 503, TEXT, f"{self.readiness}\n".encode(), []
            case "/metrics":
                accepted = next((value for name, value in scope["headers"] if name == b"accept"), b"")
                try:
                    encode, content_type = choose_encoder(accepted.decode("latin-1"))
                except (TypeError, ValueError):  # a version that is none
                    encode, content_type = choose_encoder("")
                return 200, content_type, encode(self._registry), []
            case "/ui" | "/ui/":
                return 200, HTML, self._pages(), [NO_SCRIPT]
            case _:
                told = {mount.path: mount.summary for mount in reversed(self._mounts) if mount.summary}
                page = {"product": "fleetplane", "version": self._version, "paths": INDEX | told}
                return 200, "application/json", json.dumps(page, indent=2).encode() + b"\n", []

    def _pages(self) -> bytes:
        found = {mount.path: mount.summary for mount in reversed(self._mounts) if mount.is_page}
        entries = "".join(
            f'<li><a href="{html.escape(path)}">{html.escape(path)}</a> {html.escape(summary)}</li>\n'
            for path, summary in {**found, "/metrics": INDEX["/metrics"]}.items()
        )
        return (
            '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Fleetplane</title>'
            '<meta name="viewport" content="width=device-width">'
            '<meta name="color-scheme" content="light dark">'
            f"</head>\n<body>\n<h1>Fleetplane {html.escape(self._version)}</h1>\n<ul>\n{entries}</ul>\n"
            "</body>\n</html>\n"
        ).encode()


def _problem(
    status: int, code: str, message: str, headers: list[tuple[bytes, bytes]] | None = None
) -> tuple[int, str, bytes, list[tuple[bytes, bytes]]]:
    body = json.dumps({"error": {"code": code, "message": message}}).encode() + b"\n"
    return status, "application/json", body, headers or []
