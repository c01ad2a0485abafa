"""Instance ids: three letters that say what it is, then a time-ordered UUID.

`knc06awcb4f5hzmfey7qwt7s8a6q4` is the prefix `knc` and the 128 bits of a version 7 UUID in lower-case
Crockford base32, most significant bit first, two zero bits at the end. Agents refuse to start with an
id that is not exactly this, so neither do we accept one.

Time and randomness are arguments: nothing here reads a clock.
"""

from __future__ import annotations

import re
from uuid import UUID

from fleetplane.kernel.errors import InvalidArgument

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: no i, l, o, u
PREFIX_LENGTH = 3
BODY_LENGTH = 26  # 128 bits and 2 of padding, 5 bits a character
ID_LENGTH = PREFIX_LENGTH + BODY_LENGTH
RANDOM_BYTES = 10  # 74 bits are used: 12 before the variant, 62 after
MAX_UNIX_MS = (1 << 48) - 1

_PADDING_BITS = BODY_LENGTH * 5 - 128
_PREFIX = re.compile(r"[a-z]{3}")
_VALUES = {character: value for value, character in enumerate(ALPHABET)}


def generate(prefix: str, now_ms: int, random: bytes) -> str:
    """A new id; ids of later milliseconds sort after it, whatever the randomness."""
    if not 0 <= now_ms <= MAX_UNIX_MS:
        raise InvalidArgument(f"{now_ms} ms does not fit the 48 bits of time in an id")
    if len(random) < RANDOM_BYTES:
        raise InvalidArgument(f"an id needs {RANDOM_BYTES} random bytes, not {len(random)}")
    entropy = int.from_bytes(random[:RANDOM_BYTES], "big") & ((1 << 74) - 1)
    before_variant, after_variant = entropy >> 62, entropy & ((1 << 62) - 1)
    bits = now_ms << 80 | 0x7 << 76 | before_variant << 64 | 0b10 << 62 | after_variant
    return encode(prefix, UUID(int=bits))


def encode(prefix: str, uuid: UUID) -> str:
    if not _PREFIX.fullmatch(prefix):
        raise InvalidArgument(f"an id begins with three letters a to z, not {prefix!r}")
    bits = uuid.int << _PADDING_BITS
    body = "".join(ALPHABET[bits >> shift & 31] for shift in range(5 * (BODY_LENGTH - 1), -1, -5))
    return prefix + body


def decode(text: str) -> tuple[str, UUID]:
    """The id's prefix and UUID, or InvalidArgument that says what is wrong with it."""
    if len(text) != ID_LENGTH:
        raise _wrong(f"an instance id has {ID_LENGTH} characters; {text[:64]!r} has {len(text)}")
    prefix, body = text[:PREFIX_LENGTH], text[PREFIX_LENGTH:]
    if not _PREFIX.fullmatch(prefix):
        raise _wrong(f"instance id {text!r} does not begin with three letters a to z")
    bits = 0
    for position, character in enumerate(body, start=PREFIX_LENGTH + 1):
        value = _VALUES.get(character)
        if value is None:
            raise _wrong(f"instance id {text!r} has {character!r} as character {position}")
        bits = bits << 5 | value
    if bits & ((1 << _PADDING_BITS) - 1):
        raise _wrong(f"instance id {text!r} ends in bits that must be zero")
    uuid = UUID(int=bits >> _PADDING_BITS)
    if uuid.int >> 76 & 0xF != 7 or uuid.int >> 62 & 0b11 != 0b10:
        raise _wrong(f"instance id {text!r} does not hold a version 7 UUID")
    return prefix, uuid


def validate(text: str) -> str:
    """The id itself, if it is one."""
    decode(text)
    return text


def created_at_ms(text: str) -> int:
    """When the id was made, in Unix milliseconds."""
    _, uuid = decode(text)
    return uuid.int >> 80


def storage_key(text: str) -> str:
    """How records about it are named in object storage: sorted by age, whatever the prefix."""
    prefix, uuid = decode(text)
    return f"{uuid}-{prefix}"


def _wrong(why: str) -> InvalidArgument:
    return InvalidArgument(why, field="instance_id")
