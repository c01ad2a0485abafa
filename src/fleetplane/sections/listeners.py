"""What every listener can be told, and the web listener."""

from __future__ import annotations

from fleetplane.sections.base import SettingsSection, at_least

DEFAULT_PLACE = "unix:"
"""An address that stands for the default socket: the system's for root, else in the data directory."""


class ListenerSettings(SettingsSection, frozen=True):
    addresses: tuple[str, ...] = ()
    """`host:port` (port 0 picks a free one) or `unix:///path`."""
    connections: int = 0
    """Held at once, shared evenly by the addresses; 0: a share of what the process may open."""
    connections_per_address: int = 0
    """That one peer's address may hold of them; 0: half."""
    streams_per_connection: int = 128
    """Calls under way on one TCP connection. Clients that want more wait, or open another connection."""

    @property
    def is_encrypted(self) -> bool:
        """Whether a listener that may have TLS is to have it: its own setting `tls`."""
        return bool(getattr(self, "tls", True))

    def __post_init__(self) -> None:
        at_least("listeners.*.connections", self.connections, 0)
        at_least("listeners.*.connections_per_address", self.connections_per_address, 0)
        at_least("listeners.*.streams_per_connection", self.streams_per_connection, 1)


class WebListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8080",)


class ListenersSettings(SettingsSection, frozen=True):
    """The server's own listeners; each domain adds those that it declares."""

    web: WebListenerSettings = WebListenerSettings()
