"""What the connection proves about a caller: the facts an authenticator decides on.

Nothing here comes from a message. Read from the ASGI scope on demand, because most calls are
authenticated by one of these facts and never look at the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fleetplane.kernel.access import Principal
from fleetplane.rpc.serving.metadata import decode_binary

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
