"""An agent's connection to its server: how the channel is set up, whom it trusts, what a failed call means.

What differs between protocols is a parameter: message size, keepalive, which status codes a retry does not
change, and the error classes. Addresses are parsed by the domains. A server whose own certificate is on an
Ed25519 key cannot be verified by this gRPC library, whatever it was issued by; keys of that kind on the
agent's side are fine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from fleetplane.kernel.errors import FleetplaneError, SettingsError, Unavailable

MIB: Final = 1024 * 1024
CALL_IS_OVER: Final = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError)
"""What the library raises from a write to a call that has ended; the last of them if it does so meanwhile."""


class LinkLost(Unavailable):
    """The connection to the server is gone, or never came up."""

    reason = "LINK_LOST"


class ServerRefused(FleetplaneError):
    """The server answered, and repeating the call soon would not change its answer."""

    reason = "REFUSED"

    def __init__(self, message: str, *, code: grpc.StatusCode = grpc.StatusCode.PERMISSION_DENIED) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    message_bytes: int = 4 * MIB
    """The longest message, in either direction."""
    keepalive_seconds: float = 20.0
    """Between pings on a quiet connection; with the time-out, a server that vanished is noticed in 30 s."""
    keepalive_timeout_seconds: float = 10.0
    pings_when_idle: bool = True
    """Also while no call is open; the server must permit that."""
    refusals: frozenset[grpc.StatusCode] = frozenset()
    """Status codes that repeating the call does not change."""
    lost: type[LinkLost] = LinkLost
    refused: type[ServerRefused] = ServerRefused

    def arguments(self, *, server_name: str = "", authority: str = "") -> tuple[tuple[str, int | str], ...]:
        """Channel arguments, as gRPC names them."""
        return (
            # Each connection attempt is ours to time: no back-off shared with an earlier channel.
            ("grpc.use_local_subchannel_pool", 1),
            # The agent trusts one authority; a proxy from the environment is meant for other traffic.
            ("grpc.enable_http_proxy", 0),
            ("grpc.keepalive_time_ms", int(self.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_seconds * 1000)),
            ("grpc.keepalive_permit_without_calls", int(self.pings_when_idle)),
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", self.message_bytes),
            *((("grpc.ssl_target_name_override", server_name),) if server_name else ()),
            *((("grpc.default_authority", authority),) if authority else ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTrust:
    """The authorities that the server is verified against, and the client certificate, if any."""

    roots_pem: bytes | None = None
    """Authorities; None: those that this machine trusts."""
    key_pem: bytes | None = None
    certificate_pem: bytes | None = None
    plaintext: bool = False

    def __repr__(self) -> str:
        if self.plaintext:
            return "<Trust plaintext>"
        return (
            f"<Trust roots={'own' if self.roots_pem else 'system'} certificate={bool(self.certificate_pem)}>"
        )


PLAINTEXT: Final = ServerTrust(plaintext=True)


def channel(
    address: str, trust: ServerTrust, options: LinkOptions, *, server_name: str = "", authority: str = ""
) -> grpc.aio.Channel:
    """A channel to `address`, in gRPC's own notation.

    `server_name` is the name in the server's certificate where that is not the host that is dialled;
    `authority` the name of the server in requests, where a relay is dialled in its place.
    """
    arguments = options.arguments(server_name=server_name, authority=authority)
    if trust.plaintext:
        return grpc.aio.insecure_channel(address, options=arguments)
    credentials = grpc.ssl_channel_credentials(trust.roots_pem, trust.key_pem, trust.certificate_pem)
    return grpc.aio.secure_channel(address, credentials, options=arguments)


def roots_from(file: Path | None) -> bytes | None:
    """The authorities in a file of the owner's; None stays None: those that this machine trusts."""
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise SettingsError(f"the authority's certificate cannot be read: {error}") from error


def words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no further words'}"


def translated(error: grpc.aio.AioRpcError, options: LinkOptions) -> LinkLost | ServerRefused:
    """A failed call as one of two: retry it, or not."""
    if error.code() in options.refusals:
        return options.refused(words(error), code=error.code())
    return options.lost(words(error))


async def ending(call: grpc.aio.StreamStreamCall[Any, Any]) -> grpc.aio.AioRpcError:
    """How a stream ended, as the error that reading it would have raised."""
    return grpc.aio.AioRpcError(
        await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
    )


def causes(error: BaseException) -> Iterator[BaseException]:
    """The single errors of a group, or the error itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from causes(one)
    else:
        yield error


def most_telling(
    errors: Sequence[BaseException],
    kinds: Sequence[type[FleetplaneError]],
    translate: Callable[[grpc.aio.AioRpcError], FleetplaneError],
) -> FleetplaneError:
    """Several tasks saw one stream end, each in its own way: the first error of the first kind there is."""
    known = [translate(one) if isinstance(one, grpc.aio.AioRpcError) else one for one in errors]
    for kind in kinds:
        for one in known:
            if isinstance(one, kind):
                return one
    return LinkLost("the server ended the stream")
