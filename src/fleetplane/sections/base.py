"""What every table of the configuration file is made of, and the tables of listeners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from fleetplane.kernel.errors import SettingsError

MARK = "kept off command lines"
Secret = Annotated[str, msgspec.Meta(extra={MARK: True})]
"""A setting that must not stand on a command line, where every user of the machine can read it."""

FILE = "names a file that holds a secret"
SecretFile = Annotated[str, msgspec.Meta(extra={FILE: True})]
"""The file that holds the setting of the same name without `_file`."""


def is_secret_file(kind: Any) -> bool:
    """Whether a setting's type is `SecretFile`."""
    return _has(kind, FILE)


def is_secret(kind: Any) -> bool:
    """Whether a setting's type is `Secret`."""
    return _has(kind, MARK)


def _has(kind: Any, mark: str) -> bool:
    return any(
        isinstance(meta, msgspec.Meta) and (meta.extra or {}).get(mark, False)
        for meta in getattr(kind, "__metadata__", ())
    )


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SettingsError(f"{key}: {str(value)!r} is not one of {', '.join(choices)}")


def at_least(key: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise SettingsError(f"{key}: {value} is below {minimum}")


class SettingsSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""

    def own_names(self) -> Iterable[str]:
        """Names under which clients look for this server, as this table says."""
        return ()


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
