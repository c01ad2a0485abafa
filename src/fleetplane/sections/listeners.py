"""The listeners: where they are, and what each may and may not be told."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fleetplane.domains.gpus.wire import SELECTABLE, Dialect
from fleetplane.kernel.errors import SettingsError
from fleetplane.sections.base import Section, at_least, one_of

DEFAULT_SOCKET = Path("/var/run/device-api/device.sock")
DEFAULT_PLACE = "unix:"
"""An address that stands for the default socket: the system's for root, else in the data directory."""


class ListenerSettings(Section, frozen=True):
    addresses: tuple[str, ...] = ()
    """`host:port` (port 0 picks a free one) or `unix:///path`."""


class WebListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8080",)


class DeviceApiSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = (DEFAULT_PLACE, "127.0.0.1:50051")
    socket_mode: str = "0660"
    dialect: Dialect = Dialect.SUPERSET
    """Of the answers, when the caller's metadata asks for none."""
    allow_remote_plaintext: bool = False
    """Permit addresses beyond loopback. Anyone who can reach them can write GPU health."""

    def __post_init__(self) -> None:
        one_of("listeners.device-api.dialect", self.dialect, SELECTABLE)
        try:
            valid = 0 <= int(self.socket_mode, 8) <= 0o777
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(
                f"listeners.device-api.socket_mode: {self.socket_mode!r} is no octal file mode"
            )


class RegistrationSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8992",)


class OperatorSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8993",)


class AgentSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8994",)


class ProxyAgentsSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8995",)
    tls: bool = True
    allow_plaintext: bool = False
    """Permit `tls = false`. Private keys of certificates travel on this listener."""

    def __post_init__(self) -> None:
        if not self.tls and not self.allow_plaintext:
            raise SettingsError(
                "listeners.proxy-agents.tls: private keys travel on this listener, and need TLS",
                hint="leave tls on, or set listeners.proxy-agents.allow_plaintext = true as well",
            )


class BoardsListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:9090",)


class PlainBoardsSettings(ListenerSettings, frozen=True):
    """For older agents and tools of boards that speak plain text and nothing else; closed unless given."""

    allow_remote: bool = False
    """Permit addresses beyond loopback. Whoever reaches them can say that it is any board."""


class EdgeListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:50056",)
    tls: bool = False
    """TLS of our own; without it, an ingress in front ends TLS and passes HTTP/2 on in clear text."""
    allow_remote_plaintext: bool = False
    """Permit addresses beyond loopback without TLS, where the way from the ingress is trusted."""
    connections: int = 0
    """Held at once, one for each daemon that comes by itself; 0: a share of what the process may open."""

    def __post_init__(self) -> None:
        at_least("listeners.edge.connections", self.connections, 0)


class ListenersSettings(Section, frozen=True):
    web: WebListenerSettings = WebListenerSettings()
    registration: RegistrationSettings = RegistrationSettings()
    operator: OperatorSettings = OperatorSettings()
    agent: AgentSettings = AgentSettings()
    proxy_agents: ProxyAgentsSettings = msgspec.field(name="proxy-agents", default=ProxyAgentsSettings())
    boards: BoardsListenerSettings = BoardsListenerSettings()
    boards_plain: PlainBoardsSettings = msgspec.field(name="boards-plain", default=PlainBoardsSettings())
    edge: EdgeListenerSettings = EdgeListenerSettings()
    device_api: DeviceApiSettings = msgspec.field(name="device-api", default=DeviceApiSettings())
