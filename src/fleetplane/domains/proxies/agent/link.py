"""The connection to the server. TLS always, unless somebody insisted: private keys travel on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from fleetplane.kernel.errors import FleetplaneError, SettingsError, Unavailable

MESSAGE_LIMIT_BYTES: Final = 16 * 1024 * 1024

CHANNEL_OPTIONS: Final = (
    # Each connection attempt is ours to time: no back-off shared with an earlier channel.
    ("grpc.use_local_subchannel_pool", 1),
    # Trust is in one authority's hands; a proxy from the environment has no part in it.
    ("grpc.enable_http_proxy", 0),
    # A server that vanished without a word is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
)

REFUSALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})


class LinkLost(Unavailable):
    """The connection to the server is gone, or never came up."""

    reason = "LINK_LOST"


class Superseded(LinkLost):
    """Another stream was opened with our token: by ourselves, or by a copy of us somewhere."""

    reason = "SUPERSEDED"


class Refused(FleetplaneError):
    """The server does not want us; asking again soon would not help."""

    reason = "REFUSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    address: str
    authority: Path | None = None
    """Whom to trust; else whom this machine trusts."""
    plaintext: bool = False

    def channel(self) -> grpc.aio.Channel:
        if self.plaintext:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        try:
            roots = None if self.authority is None else self.authority.read_bytes()
        except OSError as error:
            raise SettingsError(f"the authority's certificate cannot be read: {error}") from error
        credentials = grpc.ssl_channel_credentials(roots)
        return grpc.aio.secure_channel(self.address, credentials, options=CHANNEL_OPTIONS)


def translated(error: grpc.aio.AioRpcError) -> LinkLost | Refused:
    words = f"{error.code().name}: {error.details() or 'no further words'}"
    if error.code() in REFUSALS:
        return Refused(words)
    return Superseded(words) if error.code() is grpc.StatusCode.ABORTED else LinkLost(words)
