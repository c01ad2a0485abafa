"""What the connection proves about a caller, and pushing messages to it from outside the task of the call.

Facts for authentication are read from the ASGI scope on demand, never from a message: most calls are
authenticated by one of them and never look at the others.

With a thousand watches, resuming a thousand tasks costs more than sending a thousand messages. A
transport with room takes a pushed message at once, and no task is resumed. Otherwise something is left to
await; the pusher makes sure that the call's own task awaits it before anything else is sent.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, Literal

from fleetplane.kernel.access import Principal
from fleetplane.rpc.serving.framing import Framed
from fleetplane.rpc.serving.status import decode_binary

_TAKEN: Final = object()


class Shared:
    """Messages for many streams, as the event that a transport takes: made once, and sent as it is."""

    __slots__ = ("event", "messages", "taken")

    def __init__(self, framed: Framed) -> None:
        self.event = {"type": "http.response.body", "body": framed.body, "more_body": True}
        self.messages = framed.messages
        self.taken: object = None
        """What the transport answered when it took the message. An iterator that has ended does not begin
        again: when it answers with the same one, it has taken the message as well."""

    def pushed(self, sending: Any) -> Awaitable[None] | None:
        """What `push` makes of the transport's answer."""
        left = _left(sending)
        if left is None:
            self.taken = sending
        return left


def push(send: Callable[[dict[str, Any]], Awaitable[None]], event: dict[str, Any]) -> Awaitable[None] | None:
    """Send an event; None if the transport took it, else what the call's task must await first."""
    return _left(send(event))


def _left(sending: Any) -> Awaitable[None] | None:
    if not hasattr(sending, "__next__"):
        return sending  # type: ignore[no-any-return]
    pending = next(sending, _TAKEN)
    return None if pending is _TAKEN else _rest(sending, pending)


@types.coroutine
def _rest(steps: Generator[Any, None, None], pending: Any) -> Generator[Any, None, None]:
    """What is left of an awaitable whose first step is taken."""
    yield pending
    yield from steps


Transport = Literal["unix", "tcp", "tls"]
Scope = dict[str, Any]


class Connection:
    __slots__ = ("_scope",)

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @property
    def transport(self) -> Transport:
        if "tls" in self._scope["extensions"] or self._scope["scheme"] == "https":
            return "tls"
        return "tcp" if self._client() else "unix"

    @property
    def peer(self) -> str:
        """The other end as grpc writes it: `ipv4:127.0.0.1:4711`, `ipv6:%5B::1%5D:4711`, `unix:`."""
        client = self._client()
        if client is None:
            return "unix:"
        host, port = client
        return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"

    @property
    def address(self) -> str:
        """The other end's host, for limits that hold per address; `unix` for local sockets."""
        client = self._client()
        return client[0] if client else "unix"

    @property
    def tls_version(self) -> int | None:
        """As it stands in the handshake, such as 0x0304 for TLS 1.3; None where we did not end TLS."""
        tls = self._scope["extensions"].get("tls")
        return tls["tls_version"] if tls else None

    @property
    def certificates(self) -> tuple[str, ...]:
        """The client's verified certificate chain, leaf first, each in PEM; empty without one."""
        tls = self._scope["extensions"].get("tls")
        return tuple(tls["client_cert_chain"]) if tls else ()

    def metadata(self, name: str) -> str | bytes | None:
        """The last value of one metadata field; bytes for names ending in `-bin`."""
        wanted = name.lower().encode("ascii")
        for key, value in reversed(self._scope["headers"]):
            if key == wanted:
                raw = bytes(value)
                if not wanted.endswith(b"-bin"):
                    return raw.decode("latin-1")
                try:
                    return decode_binary(raw.rpartition(b",")[2].strip())
                except ValueError:
                    return None
        return None

    @property
    def authorization(self) -> str | None:
        value = self.metadata("authorization")
        return value if isinstance(value, str) else None

    def _client(self) -> tuple[str, int] | None:
        client = self._scope.get("client")
        return (client[0], client[1]) if client and client[0] else None

    def __repr__(self) -> str:
        return f"<Connection {self.transport} {self.peer}>"


Authenticator = Callable[[Connection], Principal]
"""Says who is calling, or raises Unauthenticated or PermissionDenied."""


class FixedPrincipal:
    """An authenticator for which reaching the listener is the whole proof: every caller is the same.

    That its answer depends on nothing in the call is what this type declares; calls may then be
    admitted without asking it again.
    """

    __slots__ = ("principal",)

    def __init__(self, principal: Principal) -> None:
        self.principal = principal

    def __call__(self, _connection: Connection) -> Principal:
        return self.principal

    def __repr__(self) -> str:
        return f"<FixedPrincipal {self.principal.name}>"
