"""The form of an instance's id: three letters and a time-ordered UUID in 26 characters. Pure."""

from __future__ import annotations

import uuid
from typing import Final

from fleetplane.kernel.errors import InvalidArgument

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
"""Base 32 without the letters that are misread."""
_VALUES: Final = {character: value for value, character in enumerate(ALPHABET)}
_PREFIX_LENGTH: Final = 3
_BODY_LENGTH: Final = 26
_PADDING_BITS: Final = 2
"""26 characters hold 130 bits; the last two of them are zero, at the end and not at the front."""


def read_instance_id(text: str) -> tuple[str, uuid.UUID]:
    """Its prefix and its UUID, or why it is none."""
    prefix, body = text[:_PREFIX_LENGTH], text[_PREFIX_LENGTH:]
    if not (len(prefix) == _PREFIX_LENGTH and prefix.isascii() and prefix.isalpha() and prefix.islower()):
        raise _not_an_id(text, "it begins with three letters a to z")
    if len(body) != _BODY_LENGTH or not _VALUES.keys() >= set(body):
        raise _not_an_id(text, f"after them come {_BODY_LENGTH} characters of {ALPHABET}")
    number = 0
    for character in body:
        number = number << 5 | _VALUES[character]
    if number & (1 << _PADDING_BITS) - 1:
        raise _not_an_id(text, "its last two bits are zero")
    value = uuid.UUID(int=number >> _PADDING_BITS)
    if value.version != 7:
        raise _not_an_id(text, "it holds a UUID of version 7")
    return prefix, value


def _not_an_id(text: str, rule: str) -> InvalidArgument:
    return InvalidArgument(f"{text!r} is no instance id: {rule}", field="instance-id")
