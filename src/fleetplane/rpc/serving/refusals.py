"""Answers to requests that never become calls.

A caller that speaks gRPC gets a gRPC status; anyone else gets plain HTTP with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import structlog

from fleetplane.rpc.serving import framing, status
from fleetplane.rpc.serving.connection import Connection, Scope
from fleetplane.rpc.serving.exchange import CONTENT_TYPE, Receive, Send
from fleetplane.rpc.serving.status import GrpcStatus

if TYPE_CHECKING:
    from fleetplane.rpc.serving.call import House

_log = structlog.get_logger("fleetplane.rpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefusal:
    http_status: int = 200
    """Anything but 200 means that the request is not gRPC."""
    status: GrpcStatus

    @classmethod
    def metadata(cls, found: str, limit: str) -> RequestRefusal:
        return cls(
            status=GrpcStatus(code=status.RESOURCE_EXHAUSTED, message=f"{found} exceed the limit of {limit}")
        )

    @classmethod
    def encoding(cls, encoding: bytes) -> RequestRefusal:
        name = encoding.decode("ascii", "replace")
        return cls(
            status=GrpcStatus(code=status.UNIMPLEMENTED, message=f"compression {name!r} is not supported")
        )

    @classmethod
    def bad_timeout(cls, message: str) -> RequestRefusal:
        return cls(status=GrpcStatus(code=status.INTERNAL, message=message))


def _http(http_status: int, message: str) -> RequestRefusal:
    return RequestRefusal(http_status=http_status, status=GrpcStatus(code=status.UNKNOWN, message=message))


UNKNOWN_METHOD: Final = RequestRefusal(
    status=GrpcStatus(code=status.UNIMPLEMENTED, message="Method not found!")
)
NO_TRAILERS: Final = RequestRefusal(
    status=GrpcStatus(
        code=status.INTERNAL, message="the request lacks 'te: trailers'; something between us drops it"
    )
)
NOT_POST: Final = _http(405, "gRPC calls are POST requests")
NOT_GRPC: Final = _http(415, "this port speaks gRPC: send content-type application/grpc")
HTTP1: Final = _http(505, "gRPC needs HTTP/2; this request came over HTTP/1")


async def send(refusal: RequestRefusal, house: House, scope: Scope, send_event: Send) -> None:
    """Refuse, and leave one line in the log."""
    connection = Connection(scope)
    if refusal.http_status != 200:
        house.statistics.refused_requests += 1
    _log.info(
        "rpc.refused",
        listener=house.listener,
        http_status=refusal.http_status,
        code=status.CODE_NAMES[refusal.status.code],
        message=refusal.status.message,
        peer=connection.peer,
    )
    body = b""
    if refusal.http_status == 200:
        headers = [
            CONTENT_TYPE,
            (b"grpc-accept-encoding", framing.ACCEPT_ENCODING),
            *refusal.status.headers(),
        ]
    else:
        body = refusal.status.message.encode() + b"\n"
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    try:
        await send_event({"type": "http.response.start", "status": refusal.http_status, "headers": headers})
        await send_event({"type": "http.response.body", "body": body, "more_body": False})
    except OSError:
        return  # the client did not wait to hear it


async def other_protocol(scope: Scope, receive: Receive, send_event: Send) -> None:
    """Lifespan has nothing to do here; WebSockets are refused."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send_event({"type": "lifespan.startup.complete"})
        await send_event({"type": "lifespan.shutdown.complete"})
    elif scope["type"] == "websocket":
        await send_event({"type": "websocket.close", "code": 1003})
