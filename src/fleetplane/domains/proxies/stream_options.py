"""What a stream is made of: TCP or UDP that is passed on as it comes. Shape only, as `typed_options`.

The same structs are the body of a request, the record, and what agents read, who refuse a field that they
do not know.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetplane.domains.proxies.typed_options import AccessRule
from fleetplane.domains.proxies.value import Value

StreamProtocol = Literal["tcp", "udp"]


class StreamRoute(Value, frozen=True):
    """Where connections go whose TLS handshake asks for one of these names."""

    names: tuple[str, ...]
    """Such as `a.example.com`, `*.example.com`, or `.example.com` for both it and what is below it."""
    upstream_id: str


class StreamLimits(Value, frozen=True):
    connections: int | UnsetType = UNSET
    """At once from one address."""
    download_bytes_per_second: int | UnsetType = UNSET
    """Of one connection, to the client."""
    upload_bytes_per_second: int | UnsetType = UNSET


class StreamTimeouts(Value, frozen=True):
    """Seconds."""

    connect: int | UnsetType = UNSET
    """Until a server of the upstream has accepted the connection."""
    idle: int | UnsetType = UNSET
    """Between two reads or writes; then the connection, or the session of datagrams, ends."""


class SentStream(Value, frozen=True):
    """A stream as it is sent to agents."""

    name: str
    listen_port: int
    protocol: StreamProtocol = "tcp"
    upstream_id: str | UnsetType = UNSET
    """Where everything goes that no route names."""
    routes: tuple[StreamRoute, ...] | UnsetType = UNSET
    send_proxy_protocol: bool | UnsetType = UNSET
    rules: tuple[AccessRule, ...] | UnsetType = UNSET
    limits: StreamLimits | UnsetType = UNSET
    timeouts: StreamTimeouts | UnsetType = UNSET
    responses: int | UnsetType = UNSET
    log: bool | UnsetType = UNSET


def stream_options(text: str) -> SentStream:
    """Read what was sent; raises `msgspec.ValidationError` for what this program does not know."""
    return msgspec.json.decode(text, type=SentStream)
