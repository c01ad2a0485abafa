"""Documents at fixed paths: the OpenAPI document, its interactive page, public keys.

A bare ASGI application. Everything comes from our own origin; the page's policy lets it load
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from fleetplane.kernel.errors import NotFound
from fleetplane.web.gateway import Receive, Scope, Send
from fleetplane.web.problems import MethodNotAllowed, refusal

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Scripts only from files of ours, none that makes others out of text, and nobody frames our pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    content_type: str
    content: Callable[[], bytes]
    """Asked for each time; whoever makes it expensively keeps it."""
    cache_seconds: int = 0


class Documents:
    def __init__(self, by_path: Mapping[str, Document]) -> None:
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
            status, body = 200, document.content()
            age = document.cache_seconds
            headers |= {
                "content-type": document.content_type,
                "cache-control": f"public, max-age={age}" if age else "no-cache",
                "content-security-policy": POLICY,
            }
        headers["content-length"] = str(len(body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def file(name: str, content_type: str) -> Document:
    """One of the files that ship with the server."""
    return Document(content_type=content_type, content=lambda: _file(name), cache_seconds=300)


def _file(name: str) -> bytes:
    return (files("fleetplane.web") / "files" / name).read_bytes()
