"""The owner's socket: gRPC for what it always had, and everything of the web listener beside it.

Reaching the socket is the credential. A request that is not gRPC goes to the web listener's application with
a token of the owner's principal, kept in this process; a credential in the request is dropped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fleetplane.web.ops import OpsApp, Receive, Scope, Send

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
