"""Settings of providers as they are stored: what they are to have, and what each has of it."""

from __future__ import annotations

import msgspec

from fleetplane.domains.gpus.provider_settings.rules import ProviderSettingsSpec
from fleetplane.kernel.resources import Kind, Nothing, Resource

SUBJECT = "gpus.settings"
AT = "gpus/providers"
"""Where the settings lie, what providers have of them, and their rollouts."""
NAME = "providers"
"""The one object: settings hold for every provider that asks for them."""


class SettingsAppliedSpec(msgspec.Struct, frozen=True, kw_only=True):
    provider: str
    again: bool = False
    """It is to try once more what it could not take; said here where several servers share a database."""


class SettingsAppliedStatus(msgspec.Struct, frozen=True, kw_only=True):
    version: str = ""
    """Which settings the provider says are in force."""
    wanted: str = ""
    """Which ones it was sent last, taken or refused."""
    error: str = ""
    failures: int = 0
    failed_at_ns: int = 0
    """When the last of them was heard of."""


StoredSettings = Resource[ProviderSettingsSpec, Nothing]
SettingsApplied = Resource[SettingsAppliedSpec, SettingsAppliedStatus]

PROVIDER_SETTINGS: Kind[ProviderSettingsSpec, Nothing] = Kind(
    "gpu-provider-settings", ProviderSettingsSpec, Nothing
)
SETTINGS_APPLIED: Kind[SettingsAppliedSpec, SettingsAppliedStatus] = Kind(
    "gpu-settings-applied", SettingsAppliedSpec, SettingsAppliedStatus
)
KINDS = (PROVIDER_SETTINGS, SETTINGS_APPLIED)
