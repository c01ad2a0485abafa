"""Provider options: from the configuration's plain values to a checked struct."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from fleetplane.kernel.errors import SettingsError


class ProviderOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one kind of provider."""


O = TypeVar("O", bound=ProviderOptions)  # noqa: E741


def parse(kind: str, options: Mapping[str, object], shape: type[O]) -> O:
    """`options` as `shape`, or a `SettingsError` that names the key and the nearest known one."""
    known = shape.__struct_encode_fields__
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            advice = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise SettingsError(f"provider {kind!r} has no option {key!r}{advice}", field=f"options.{key}")
    try:
        return msgspec.convert(dict(options), shape)
    except msgspec.ValidationError as error:
        raise SettingsError(f"options of provider {kind!r}: {error}", field="options") from None
