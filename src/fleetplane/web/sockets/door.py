"""The handshake of a WebSocket: allowed origins, the token of the request, refusals; and decoding.

Bare ASGI; knows the meaning of no message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied
from fleetplane.kernel.identity.operators import bearer_of
from fleetplane.web.rest.gateway import Scope, Send
from fleetplane.web.rest.problems import Envelope, refusal

ANYWHERE = "*"
POLICY_VIOLATION = 1008
INTERNAL_ERROR = 1011
RESTARTING = 1012
TOKEN_ENDED = 4401
RIGHTS_ENDED = 4403
MESSAGE_LIMIT = 64 * 1024
"""Characters of one message: they ask for things, they do not upload."""


def check_origin(headers: dict[bytes, bytes], allowed: Collection[str]) -> None:
    """Refuse a browser whose page comes from another origin: it must not listen with the user's token."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin or ANYWHERE in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != headers.get(b"host", b"").decode("latin-1"):
        raise PermissionDenied(f"pages of {origin[:128]} are not an allowed origin")


def query_of(scope: Scope) -> dict[str, str]:
    """The query's values; of several of one name the last."""
    raw: bytes = scope.get("query_string", b"")
    return {name: values[-1] for name, values in parse_qs(raw.decode("latin-1")).items()}


def token_of(scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """The token in the request's query or `Authorization` header; None for a request without one."""
    given = query_of(scope).get("token")
    if given:
        return given
    authorization = headers.get(b"authorization", b"").decode("latin-1")
    return bearer_of(authorization) if authorization else None


def decode_message(message: Mapping[str, Any], *, limit: int = MESSAGE_LIMIT) -> dict[str, Any]:
    """The JSON object that a client sent; anything else is refused, however deep it is nested."""
    raw = message.get("text") or message.get("bytes") or b""
    if len(raw) > limit:
        raise InvalidArgument(f"a message has at most {limit} characters")
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidArgument("nested too deep") from error
    if not isinstance(found, dict):
        raise InvalidArgument("a message must be an object")
    return found


async def deny(
    error: FleetplaneError, clock: Clock, scope: Scope, send: Send, *, envelope: Envelope = refusal
) -> None:
    """Refuse the handshake with an HTTP answer where the server supports it, else by closing."""
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
