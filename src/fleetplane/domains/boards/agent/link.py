"""Connections to the server: finding its authority by a fingerprint, and channels that trust only that."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import grpc
import grpc.aio

from fleetplane.domains.boards.agent.identity_folder import Credentials
from fleetplane.kernel.errors import FleetplaneError, InvalidArgument, PermissionDenied, Unavailable

CALL_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 10.0
MESSAGE_LIMIT_BYTES: Final = 4 * 1024 * 1024
DEFAULT_PORT: Final = 9090
CHAIN_LIMIT: Final = 10
OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    # A server that vanished without a word is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
)

_PERMANENT: Final = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}


class Refused(PermissionDenied):
    """The server answered, and its answer will be the same next time."""

    reason = "REFUSED_BY_SERVER"


class OutOfReach(Unavailable):
    reason = "SERVER_OUT_OF_REACH"


def endpoint(address: str) -> tuple[str, int]:
    """`host:port`, `[::1]:port` or `host`."""
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = address, str(DEFAULT_PORT)
    host = host.strip("[]")
    known = not (":" in host and not _is_address(host))
    if not host or not known or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{address!r} is no HOST:PORT", field="server")
    return host, int(port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def canonical(address: str) -> str:
    host, port = endpoint(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def authority_behind(address: str, fingerprint: str) -> bytes:
    """The authority's certificate, in PEM, that the server shows and the fingerprint vouches for.

    Nothing is said to the server before this: whoever cannot show that certificate learns nothing. That
    the server also holds a certificate of it is proven by the connection made next.
    """
    host, port = endpoint(address)
    try:
        async with asyncio.timeout(2 * CONNECT_SECONDS):
            chain = await asyncio.to_thread(_shown_by, host, port)
    except (OSError, TimeoutError) as error:
        raise OutOfReach(f"{address} does not answer: {error or 'no answer in time'}") from error
    for der in chain:
        if hmac.compare_digest(hashlib.sha256(der).hexdigest(), fingerprint):
            return ssl.DER_cert_to_PEM_cert(der).encode()
    raise PermissionDenied(
        f"{address} is not the server that this join token is from",
        details={"cause": "fingerprint"},
        hint="see that the address is right; if it is, someone stands between",
    )


def _shown_by(host: str, port: int) -> Sequence[bytes]:
    """The certificates of a server that is not trusted with anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=host) as secure,
    ):
        # A method of the socket itself from Python 3.13 on.
        ask = getattr(secure, "get_unverified_chain", None)
        if ask is None:
            ask = cast("Any", secure)._sslobj.get_unverified_chain
        shown = cast("Callable[[], list[Any] | None]", ask)() or []
        return [one if isinstance(one, bytes) else _der(one) for one in shown[:CHAIN_LIMIT]]


def _der(certificate: Any) -> bytes:
    """Of what Python 3.11 and 3.12 give: an object that writes itself as PEM by default."""
    pem: str = certificate.public_bytes()
    return ssl.PEM_cert_to_DER_cert(pem)


def anonymous_channel(address: str, authority_pem: bytes, *, server_name: str = "") -> grpc.aio.Channel:
    return _channel(address, grpc.ssl_channel_credentials(authority_pem), server_name)


def own_channel(address: str, identity: Credentials, *, server_name: str = "") -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        identity.authority_pem, identity.key_pem, identity.certificate_pem
    )
    return _channel(address, credentials, server_name)


def _channel(address: str, credentials: grpc.ChannelCredentials, server_name: str) -> grpc.aio.Channel:
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return grpc.aio.secure_channel(canonical(address), credentials, options=(*OPTIONS, *named))


def explained(error: grpc.aio.AioRpcError) -> FleetplaneError:
    """A failed call, as one of two: try again, or do not."""
    words = f"{error.code().name}: {error.details() or 'no further words'}"
    return Refused(words) if error.code() in _PERMANENT else OutOfReach(words)
