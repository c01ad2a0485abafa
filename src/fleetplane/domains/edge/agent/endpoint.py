"""The address of the server: with TLS, unless the address says that a proxy in front of it ends TLS.

`https://` and `http://` are taken at their word. An address without a scheme is TLS if it names port
443 or none, and plain otherwise: that is how tokens name a server behind an ingress and one beside us.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from fleetplane.kernel.errors import InvalidArgument
from fleetplane.node import link
from fleetplane.node.link import LinkLost, LinkOptions, ServerRefused, ServerTrust

CALL_LIMIT_SECONDS: Final = 30.0
TLS_PORT: Final = 443
OPTIONS: Final = LinkOptions(
    message_bytes=16 * link.MIB,
    keepalive_seconds=30.0,
    keepalive_timeout_seconds=15.0,
    pings_when_idle=False,
    refusals=frozenset(
        {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.INVALID_ARGUMENT,
        }
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialTarget:
    address: str
    """`host:port`."""
    tls: bool


def target(endpoint: str, *, plaintext: bool | None = None) -> DialTarget:
    """The host, port and transport of an endpoint; `plaintext` overrides what the address implies."""
    text = endpoint.strip().rstrip("/")
    matched = re.fullmatch(r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+)(?::(\d{1,5}))?", text)
    if matched is None:
        raise InvalidArgument(f"{endpoint[:200]!r} is no address of a server; one is relay.example.com:443")
    scheme, host, written = matched.groups()
    port = int(written) if written else (80 if scheme == "http" else TLS_PORT)
    if not 0 < port < 65536:
        raise InvalidArgument(f"{endpoint[:200]!r} names a port that there is not")
    tls = scheme == "https" if scheme else port == TLS_PORT
    return DialTarget(address=f"{host}:{port}", tls=tls if plaintext is None else not plaintext)


def channel(to: DialTarget, *, authority: Path | None = None) -> grpc.aio.Channel:
    """`authority` is whom to trust; without it, whom this machine trusts."""
    trust = ServerTrust(roots_pem=link.roots_from(authority)) if to.tls else link.PLAINTEXT
    return link.channel(to.address, trust, OPTIONS)


def translated(error: grpc.aio.AioRpcError) -> LinkLost | ServerRefused:
    return link.translated(error, OPTIONS)
