"""The two signed documents of an upgrade: what a release consists of, and who is to install it.

A manifest never changes. An order answers one check-in of one agent, by the nonce that the agent chose, so
that none that was recorded earlier can be shown to it again. What is signed begins with the document's
purpose: neither can pass for the other. Pure.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Annotated, Final, TypeVar

import msgspec

from fleetplane.kernel.errors import InvalidArgument

WHEEL_LIMIT_BYTES: Final = 64 * 1024 * 1024
"""Of one wheel; the largest that agents need has 7 MB."""
FILES_LIMIT: Final = 200
"""Wheels of one release: 25 distributions for eight platforms."""
RELEASE_LIMIT_BYTES: Final = 512 * 1024 * 1024
"""Of all files of a release."""
DOCUMENT_LIMIT_BYTES: Final = 64 * 1024
"""200 files of 300 bytes, and what stands beside them."""
NONCE_BYTES: Final = 16
KEY_PREFIX: Final = "ed25519:"
KEY_BYTES: Final = 32
_MANIFEST: Final = b"fleetplane release manifest 1\0"
_ORDER: Final = b"fleetplane release order 1\0"

D = TypeVar("D", bound=msgspec.Struct)


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a release."""

    name: str
    sha256: str
    size: int


class ReleaseManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a release consists of."""

    version: str
    files: tuple[FileEntry, ...]
    created_at_ns: int
    floor: str = ""
    """Agents that had this release install nothing older than this version; empty for no such floor."""
    ignores_floor: bool = False
    """Whether this release may be installed although it is older than an agent's floor."""


class UpgradeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One agent is to run one version."""

    agent: str
    nonce: str
    """Of the check-in that it answers, in hexadecimal."""
    version: str
    manifest: str
    """SHA-256 of the manifest; empty for a version that the agent keeps."""
    attempt: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Counts how often the agent was asked; one that failed is not tried again under the same number."""
    seconds: float
    """The time that the new version has to say hello."""


def manifest_payload(document: bytes) -> bytes:
    """The bytes that a manifest's signature is for."""
    return _MANIFEST + document


def order_payload(document: bytes) -> bytes:
    """The bytes that an order's signature is for."""
    return _ORDER + document


def encode(document: ReleaseManifest | UpgradeOrder) -> bytes:
    """A document as it is signed and sent: JSON."""
    return msgspec.json.encode(document)


def decode(document: bytes, kind: type[D]) -> D:
    """A document whose signature was verified."""
    if len(document) > DOCUMENT_LIMIT_BYTES:
        raise InvalidArgument(f"the {kind.__name__.lower()} is larger than {DOCUMENT_LIMIT_BYTES} bytes")
    try:
        return msgspec.json.decode(document, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the {kind.__name__.lower()} cannot be read: {error}") from error


def digest(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def key_text(public_key: bytes) -> str:
    """A public key as people copy it."""
    return KEY_PREFIX + base64.b64encode(public_key).decode()


def parse_key(text: str) -> bytes:
    """A public key from what `key_text` wrote."""
    try:
        key = base64.b64decode(text.removeprefix(KEY_PREFIX).encode(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(KEY_PREFIX) or len(key) != KEY_BYTES:
        raise InvalidArgument(
            f"{text[:80]!r} is not a release key",
            field="release-key",
            hint="`fleetplane releases key` prints it: ed25519: and 44 characters",
        )
    return key
