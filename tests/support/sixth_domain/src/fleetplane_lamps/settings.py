"""Settings of lamps: the table `[lamps]`, and `[listeners.lamps]`."""

from __future__ import annotations

from fleetplane.sections.base import ListenerSettings, SettingsSection, at_least


class LampSettings(SettingsSection, frozen=True):
    limit: int = 100
    """Lamps that are kept."""

    def __post_init__(self) -> None:
        at_least("lamps.limit", self.limit, 1)


class LampListenerSettings(ListenerSettings, frozen=True):
    addresses: tuple[str, ...] = ("127.0.0.1:8997",)
