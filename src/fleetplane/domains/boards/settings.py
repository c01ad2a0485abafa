"""Settings of boards and of their two listeners."""

from __future__ import annotations

from collections.abc import Iterable

from fleetplane.sections.base import ListenerSettings, SettingsSection, at_least


class BoardSettings(SettingsSection, frozen=True):
    heartbeat_seconds: float = 30.0
    """How often boards report; after three missed reports they are not ready, after ten unknown."""
    certificate_days: float = 30.0
    """Life of a board's certificate; boards renew them when a third is left."""
    agent_port: int = 9091
    """The port of a board's agent that did not report one."""
    server_names: tuple[str, ...] = ()
    """Names and addresses at which boards dial this server, beside those it is bound to."""
    controller_id: str = ""
    """How this server is called among others; the machine's name when empty."""
    unprotected_pins: tuple[int, ...] = ()
    """Of the pins that are protected on every board (0 to 3, 14, 15), those that may be used; each board
    has to allow it too."""
    certificate_domains: tuple[str, ...] = ("pi-controller.local", "cluster.local")
    """Under which servers' names may be certified on request."""
    plain_boards: int = 100
    """Boards without a certificate that the listener without TLS lets in."""
    requests_per_minute: int = 1000
    """Per caller of REST."""
    k3s_installers: tuple[str, ...] = ()
    """Which installers of k3s root may run on boards, as `URL#sha256=CHECKSUM`; the first is the default."""
    k3s_paths: tuple[str, ...] = ("/var/lib/rancher", "/etc/rancher")
    """Folders of boards below which k3s may have its files, and below which these are deleted."""
    k3s_servers: tuple[str, ...] = ()
    """`https://` addresses of clusters elsewhere that boards may join."""
    k3s_arguments: tuple[str, ...] = ()
    """Arguments of k3s that orders may name beside the harmless ones, each as `PROGRAM:NAME`."""

    def __post_init__(self) -> None:
        at_least("boards.plain_boards", self.plain_boards, 0)
        for name in ("heartbeat_seconds", "certificate_days", "agent_port", "requests_per_minute"):
            at_least(f"boards.{name}", getattr(self, name), 1)

    def own_names(self) -> Iterable[str]:
        return self.server_names


class BoardsListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:9090",)


class PlainBoardsSettings(ListenerSettings, frozen=True):
    """For older agents and tools of boards that speak plain text and nothing else; closed unless given."""

    allow_remote: bool = False
    """Permit addresses beyond loopback. Any client that reaches them can claim to be any board."""
