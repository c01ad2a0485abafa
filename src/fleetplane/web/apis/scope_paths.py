"""Scopes in paths of the resource API, brought to the query form that its routes take.

    /apis/v1/scopes/tenants/acme/instances              /apis/v1/instances?scope=/tenants/acme
    /apis/v1/scopes/tenants/acme/groups/web/instances   /apis/v1/instances?scope=/tenants/acme/groups/web

A scope has two or four segments, which no route can express. Pure, but for the application around another.
"""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import quote

from fleetplane.web.ops import App, Receive, Scope, Send

SCOPES = "scopes"
OF_AN_OBJECT = ("actions", "explain")
"""Segments that follow the name of an object, and so never the name of a place."""


def split(path: str, places: Collection[str]) -> tuple[str, str] | None:
    """The scope and the rest of what follows `scopes/`; None if nothing follows the scope."""
    parts = path.split("/")
    if len(parts) < 3 or parts[0] != "tenants" or not all(parts[:2]):
        return None
    size = 2
    if len(parts) >= 5 and parts[2] in places and parts[4] not in OF_AN_OBJECT:
        size = 4
    return "/" + "/".join(parts[:size]), "/".join(parts[size:])


class ScopePaths:
    """Passes every request on, those with a scope in the path with that in the query."""

    def __init__(self, app: App, prefix: str, places: Collection[str]) -> None:
        self._app = app
        self._before = f"{prefix}/{SCOPES}/"
        self._prefix = prefix
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(self._before):
            found = split(path.removeprefix(self._before), self._places)
            if found is not None:
                where, rest = found
                query = f"scope={quote(where)}".encode()
                if scope["query_string"]:
                    query += b"&" + scope["query_string"]
                rewritten = f"{self._prefix}/{rest}"
                scope = {
                    **scope,
                    "path": rewritten,
                    "raw_path": quote(rewritten).encode(),
                    "query_string": query,
                }
        await self._app(scope, receive, send)
