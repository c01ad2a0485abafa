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

from fleetplane.kernel.errors import InvalidArgument, PermissionDenied
from fleetplane.node import link
from fleetplane.node.certificates import ConnectionCredentials
from fleetplane.node.link import LinkOptions, ServerTrust

CALL_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 10.0
DEFAULT_PORT: Final = 9090
CHAIN_LIMIT: Final = 10


class RefusedByServer(link.ServerRefused, PermissionDenied):
    """The server answered, and its answer will be the same next time."""

    reason = "REFUSED_BY_SERVER"


class OutOfReach(link.LinkLost):
    reason = "SERVER_OUT_OF_REACH"


OPTIONS: Final = LinkOptions(
    refusals=frozenset(
        {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.ALREADY_EXISTS,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.UNIMPLEMENTED,
        }
    ),
    lost=OutOfReach,
    refused=RefusedByServer,
)


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
    """The DER bytes of a certificate object of Python 3.11 and 3.12, which encodes PEM by default."""
    pem: str = certificate.public_bytes()
    return ssl.PEM_cert_to_DER_cert(pem)


def anonymous_channel(address: str, authority_pem: bytes, *, server_name: str = "") -> grpc.aio.Channel:
    trust = ServerTrust(roots_pem=authority_pem)
    return link.channel(canonical(address), trust, OPTIONS, server_name=server_name)


def own_channel(address: str, identity: ConnectionCredentials, *, server_name: str = "") -> grpc.aio.Channel:
    trust = ServerTrust(
        roots_pem=identity.authority_pem, key_pem=identity.key_pem, certificate_pem=identity.certificate_pem
    )
    return link.channel(canonical(address), trust, OPTIONS, server_name=server_name)


def translated(error: grpc.aio.AioRpcError) -> link.LinkLost | link.ServerRefused:
    return link.translated(error, OPTIONS)
