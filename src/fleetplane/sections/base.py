"""What every table of the configuration file is made of."""

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
