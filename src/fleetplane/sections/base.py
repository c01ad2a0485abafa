"""What every table of the configuration file is made of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from fleetplane.kernel.errors import SettingsError


def one_of(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise SettingsError(f"{key}: {str(value)!r} is not one of {', '.join(choices)}")


def at_least(key: str, value: float, minimum: float) -> None:
    if not value >= minimum:
        raise SettingsError(f"{key}: {value} is below {minimum}")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the configuration file."""
