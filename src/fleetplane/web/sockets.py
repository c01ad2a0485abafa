"""The door of a WebSocket, for whoever serves one: which pages may come, with which token, and how to refuse.

Bare ASGI. Knows no messages: what is said over a socket is its domain's business.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied, Unauthenticated
from fleetplane.web.gateway import Scope, Send
from fleetplane.web.problems import Envelope, refusal

ANYWHERE = "*"
POLICY_VIOLATION = 1008
RESTARTING = 1012
TOKEN_ENDED = 4401
RIGHTS_ENDED = 4403


def check_origin(headers: dict[bytes, bytes], allowed: Collection[str]) -> None:
    """Browsers say which page asks; a foreign page must not listen with the user's token."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin or ANYWHERE in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
        raise PermissionDenied(f"pages of {origin[:128]} may not listen here")


def query_of(scope: Scope) -> dict[str, str]:
    """The query's values; of several of one name the last."""
    raw: bytes = scope.get("query_string", b"")
    return {name: values[-1] for name, values in parse_qs(raw.decode("latin-1")).items()}


def token_of(scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """What a request brings along, in its address or its header; None for one that brings nothing."""
    given = query_of(scope).get("token")
    if given:
        return given
    authorization = headers.get(b"authorization", b"").decode("latin-1")
    scheme, _, token = authorization.partition(" ")
    if not authorization:
        return None
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("the Authorization header must be: Bearer <token>")
    return token.strip()


async def deny(
    error: FleetplaneError, clock: Clock, scope: Scope, send: Send, *, envelope: Envelope = refusal
) -> None:
    """Refuse the handshake with an HTTP answer, where the server can; else without words."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        return
    await _answer(error, clock, send, envelope, kind="websocket.http.response")


async def refuse_http(clock: Clock, send: Send, *, envelope: Envelope = refusal) -> None:
    error = InvalidArgument("this path speaks WebSocket only")
    await _answer(error, clock, send, envelope, kind="http.response")


async def _answer(error: FleetplaneError, clock: Clock, send: Send, envelope: Envelope, *, kind: str) -> None:
    answer = envelope(error, f"req-{clock.token_bytes(9).hex()}")
    headers: list[Any] = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": f"{kind}.start", "status": answer.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": answer.body})
