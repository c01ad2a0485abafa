"""The owner's socket: gRPC for what it always had, and everything of the web listener beside it.

Reaching the socket is the credential. A request that is not gRPC is passed on to the web listener's front
door with a short session of the owner's; whatever credential it brought is dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fleetplane.web.ops import OpsApp, Receive, Scope, Send

GRPC = b"application/grpc"
SESSION_SECONDS = 3600.0
"""Of the session that stands for the owner. A watch that is older ends; its client goes on with another."""
CREDENTIALS = frozenset({b"authorization", b"cookie"})


class OwnerSocket:
    """Passes gRPC to one application and the rest, as the owner, to another."""

    def __init__(
        self, grpc: Callable[[Any, Any, Any], Awaitable[None]], web: OpsApp, session: Callable[[], str]
    ) -> None:
        self._grpc = grpc
        self._web = web
        self._session = session
        self._grpc_name: Callable[[Scope], str] = getattr(grpc, "handler_name", lambda _scope: "")

    def __repr__(self) -> str:
        return f"<OwnerSocket {self._grpc!r}>"

    def handler_name(self, scope: Scope) -> str:
        """What serves a request, for the watchdog."""
        return self._grpc_name(scope) if _is_grpc(scope) else self._web.handler_name(scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not _is_grpc(scope):
            headers = [(name, value) for name, value in scope["headers"] if name not in CREDENTIALS]
            headers.append((b"authorization", b"Bearer " + self._session().encode()))
            await self._web({**scope, "headers": headers}, receive, send)
            return
        await self._grpc(scope, receive, send)


def _is_grpc(scope: Scope) -> bool:
    return any(name == b"content-type" and value.startswith(GRPC) for name, value in scope.get("headers", ()))
