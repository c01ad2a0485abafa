"""How the server is reached: over TLS, unless its address says that something in front of it does that.

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

from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, SettingsError, Unavailable

MESSAGE_LIMIT_BYTES: Final = 16 * 1024 * 1024
CALL_LIMIT_SECONDS: Final = 30.0
TLS_PORT: Final = 443

CHANNEL_OPTIONS: Final = (
    # Each connection attempt is ours to time: no back-off shared with an earlier channel.
    ("grpc.use_local_subchannel_pool", 1),
    # Trust is in one server's hands; a proxy from the environment has no part in it.
    ("grpc.enable_http_proxy", 0),
    # A server that vanished without a word is noticed within a minute.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
)

REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
    }
)


class LinkLost(Unavailable):
    """The connection to the server is gone, or never came up."""

    reason = "LINK_LOST"


class Refused(FleetplaneError):
    """The server does not want us as we are."""

    reason = "REFUSED"

    def __init__(self, message: str, *, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    address: str
    """`host:port`."""
    tls: bool


def target(endpoint: str, *, plaintext: bool | None = None) -> Target:
    """Where an endpoint is, and how it is spoken to; `plaintext` overrules what the address implies."""
    text = endpoint.strip().rstrip("/")
    matched = re.fullmatch(r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|[^\s/:@?#]+)(?::(\d{1,5}))?", text)
    if matched is None:
        raise InvalidArgument(f"{endpoint[:200]!r} is no address of a server; one is relay.example.com:443")
    scheme, host, written = matched.groups()
    port = int(written) if written else (80 if scheme == "http" else TLS_PORT)
    if not 0 < port < 65536:
        raise InvalidArgument(f"{endpoint[:200]!r} names a port that there is not")
    tls = scheme == "https" if scheme else port == TLS_PORT
    return Target(address=f"{host}:{port}", tls=tls if plaintext is None else not plaintext)


def channel(to: Target, *, authority: Path | None = None) -> grpc.aio.Channel:
    """`authority` is whom to trust; without it, whom this machine trusts."""
    if not to.tls:
        return grpc.aio.insecure_channel(to.address, options=CHANNEL_OPTIONS)
    try:
        roots = None if authority is None else authority.read_bytes()
    except OSError as error:
        raise SettingsError(f"the authority's certificate cannot be read: {error}") from error
    return grpc.aio.secure_channel(to.address, grpc.ssl_channel_credentials(roots), options=CHANNEL_OPTIONS)


def words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no further words'}"


def translated(error: grpc.aio.AioRpcError) -> LinkLost | Refused:
    if error.code() in REFUSALS:
        return Refused(words(error), code=error.code())
    return LinkLost(words(error))
