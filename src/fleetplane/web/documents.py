"""Documents at fixed paths: OpenAPI documents, their interactive page, public keys, and the console's files.

A bare ASGI application. Everything comes from our own origin; the page's policy lets it load
nothing else. The console is one page for every resource of `/apis/v1`, made in the browser from discovery.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from fleetplane.kernel.errors import NotFound
from fleetplane.web.ops import CONSOLE, Mount
from fleetplane.web.rest.gateway import App, Receive, Scope, Send
from fleetplane.web.rest.problems import MethodNotAllowed, refusal

NOT_MODIFIED, PERMANENT_REDIRECT = 304, 308
PACKED_FROM_BYTES = 1024
"""What is smaller gains nothing from being packed."""
PACKED_KEPT = 128
"""Packed documents that are kept: all that there are, about 20 KB each."""
_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;\s*q=(?:1|0\.[0-9]*[1-9]))")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Scripts only from files of ours, none that makes others out of text, and nobody frames our pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDocument:
    content_type: str
    content: Callable[[], bytes]
    """Asked for each time; whoever makes it expensively keeps it."""
    cache_seconds: int = 0


class Documents:
    def __init__(self, by_path: Mapping[str, WebDocument]) -> None:
        self._by_path = dict(by_path)

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(self._by_path)

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        document = self._by_path.get(scope["path"])
        headers = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
        if document is None:
            told = refusal(NotFound(f"there is nothing at {scope['path']}"), "")
            status, body = told.status, told.body
            headers |= told.headers
        elif scope["method"] not in ("GET", "HEAD"):
            told = refusal(MethodNotAllowed(f"{scope['method']} is not allowed here"), "")
            status, body = told.status, told.body
            headers |= {**told.headers, "allow": "GET, HEAD"}
        else:
            asked = {name: value.decode("latin-1") for name, value in scope["headers"]}
            try:
                status, body, more = _answer(document, asked)
            except NotFound as missing:
                told = refusal(missing, "")
                status, body, more = told.status, told.body, dict(told.headers)
            headers |= more
        if status != NOT_MODIFIED:
            headers["content-length"] = str(len(body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _answer(document: WebDocument, asked: Mapping[bytes, str]) -> tuple[int, bytes, dict[str, str]]:
    """What is sent of a document: nothing to who has it already, packed to who can unpack it."""
    body, age = document.content(), document.cache_seconds
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {
        "content-type": document.content_type,
        "cache-control": f"public, max-age={age}" if age else "no-cache",
        "content-security-policy": POLICY,
        "etag": tag,
        "vary": "accept-encoding",
    }
    if tag in (asked.get(b"if-none-match") or "").replace("W/", "").split(", "):
        return NOT_MODIFIED, b"", headers
    if len(body) < PACKED_FROM_BYTES or not _GZIP.search(asked.get(b"accept-encoding") or ""):
        return 200, body, headers
    return 200, _packed(body), {**headers, "content-encoding": "gzip"}


@lru_cache(maxsize=PACKED_KEPT)
def _packed(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


def moved_to(location: str) -> App:
    """An application that redirects every path to `location`."""

    async def redirect(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(b"location", location.encode()), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": PERMANENT_REDIRECT, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

    return redirect


def file(name: str, content_type: str, *, cache_seconds: int = 300) -> WebDocument:
    """One of the files that ship with the server."""
    return WebDocument(content_type=content_type, content=lambda: _file(name), cache_seconds=cache_seconds)


def _file(name: str) -> bytes:
    try:
        return (files("fleetplane.web") / "files" / name).read_bytes()
    except FileNotFoundError:  # a library that the build could not bring in
        raise NotFound(f"this server was built without {name}") from None


PAGE = CONSOLE
FILES = f"{PAGE}/console"
SCRIPT = "text/javascript; charset=utf-8"
STYLE = "text/css; charset=utf-8"
MODULES = (
    "actions.mjs",
    "api.mjs",
    "chart.mjs",
    "combobox.mjs",
    "completion.mjs",
    "density.mjs",
    "detail.mjs",
    "device.mjs",
    "dialogs.mjs",
    "dom.mjs",
    "editor.mjs",
    "first.mjs",
    "following.mjs",
    "history.mjs",
    "json_lines.mjs",
    "keys.mjs",
    "list.mjs",
    "logview.mjs",
    "main.mjs",
    "model.mjs",
    "object_form.mjs",
    "observed.mjs",
    "overview.mjs",
    "pages.mjs",
    "pages/access.mjs",
    "pages/audit.mjs",
    "pages/board_programs.mjs",
    "pages/board_provisioning.mjs",
    "pages/board_sets.mjs",
    "pages/boards.mjs",
    "pages/edge.mjs",
    "pages/gpus.mjs",
    "pages/groups.mjs",
    "pages/host_editor.mjs",
    "pages/machines.mjs",
    "pages/proxies.mjs",
    "pages/proxy_traffic.mjs",
    "pages/rollouts.mjs",
    "pages/servers.mjs",
    "parts.mjs",
    "plot.mjs",
    "providers.mjs",
    "refusals.mjs",
    "saved.mjs",
    "schema_form.mjs",
    "streams.mjs",
    "yaml.mjs",
)
LIBRARIES = {"uPlot.esm.js": SCRIPT, "uPlot.min.css": STYLE}
"""Of others, brought in by the build; pages load them when they need them, and do without if they must."""


def console_mounts() -> Sequence[Mount]:
    """`/ui/` and the files of the page."""
    page = file("console/console.html", "text/html; charset=utf-8", cache_seconds=0)
    by_path: dict[str, WebDocument] = {
        PAGE: page,
        f"{PAGE}/": page,
        f"{PAGE}/device": file("console/device.html", "text/html; charset=utf-8", cache_seconds=0),
        f"{FILES}/console.css": file("console/console.css", STYLE, cache_seconds=0),
        f"{PAGE}/live.mjs": file("live.mjs", SCRIPT, cache_seconds=0),
    }
    for name in MODULES:
        by_path[f"{FILES}/{name}"] = file(f"console/{name}", SCRIPT, cache_seconds=0)
    for name, content_type in LIBRARIES.items():
        by_path[f"{PAGE}/libraries/{name}"] = file(f"libraries/{name}", content_type, cache_seconds=0)
    return (Mount(path=PAGE, app=Documents(by_path), summary="the console: every fleet, live"),)
