"""Connections to the server: one without a certificate to register, one with it for all else.

Both trust the authority in the identity folder and nothing else, and hold the server to the
host they dialled. A server whose own certificate is on an Ed25519 key cannot be verified by
this gRPC library, whatever it was issued by; keys of that kind on our side are fine.
"""

from __future__ import annotations

from typing import Final

import grpc
import grpc.aio

from fleetplane.domains.instances.agent.identity_folder import Credentials
from fleetplane.kernel.errors import Unavailable

CALL_LIMIT_SECONDS: Final = 30.0
MESSAGE_LIMIT_BYTES: Final = 4 * 1024 * 1024

CHANNEL_OPTIONS: Final = (
    # Each connection attempt is ours to time: no back-off shared with an earlier channel.
    ("grpc.use_local_subchannel_pool", 1),
    # Trust is in one authority's hands; a proxy from the environment has no part in it.
    ("grpc.enable_http_proxy", 0),
    # A peer that vanished without a word is noticed within half a minute. Servers of this
    # protocol take a ping every ten seconds, and without streams too.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
)


class LinkLost(Unavailable):
    """The connection to the server is gone, or never came up."""

    reason = "LINK_LOST"


def registration_channel(address: str, authority_pem: bytes) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(authority_pem)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def agent_channel(address: str, identity: Credentials) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        identity.authority_pem, identity.key_pem, identity.certificate_pem
    )
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


def words(error: grpc.aio.AioRpcError) -> str:
    details = error.details() or "no further words"
    if "HANDSHAKE_FAILURE" in details:
        details += " (is the server's certificate on an Ed25519 key? This client needs P-256 or RSA there)"
    return f"{error.code().name}: {details}"
