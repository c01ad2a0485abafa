"""Which files an agent accepts. Pure.

The server asks before it takes a configuration, the agent before it replaces a file.

The extension says what a file must contain; a file that its reader could not parse is refused
here, before it replaces one that could be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

LAST_WRITTEN: Final = "write-files.last"
"""Tells watchers on the machine that files have changed; never a received file's name."""
NAME_LIMIT_BYTES: Final = 200
"""File systems take 255; ours get a prefix and a suffix while they are staged."""
_ENV_KEY: Final = re.compile(r"[A-Z0-9_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRule:
    """What files with an extension must be: in words, and what is wrong with one that is not."""

    words: str
    complaint: Callable[[bytes], str | None]


def name_complaint(name: str) -> str | None:
    """Why no file may be received under this name, or None."""
    if not name:
        return "the name is empty"
    if "/" in name or "\\" in name or "\0" in name or not name.isprintable():
        return "the name is not a plain file name"
    if name.startswith("."):
        return "the name begins with a dot"
    if name == LAST_WRITTEN:
        return "the name is reserved"
    if len(name.encode()) > NAME_LIMIT_BYTES:
        return f"the name has more than {NAME_LIMIT_BYTES} bytes"
    return None


def content_complaint(name: str, content: bytes) -> str | None:
    """Why this content does not fit the name's extension, or None."""
    extension = name[name.rindex(".") :] if "." in name else ""
    rule = CONTENT_RULES.get(extension)
    if rule is None:
        known = ", ".join(CONTENT_RULES)
        return f"files ending in {extension!r} are not supported; {known} are"
    return rule.complaint(content)


def file_complaint(name: str, content: bytes) -> str | None:
    return name_complaint(name) or content_complaint(name, content)


def _env(content: bytes) -> str | None:
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text: {error.reason}"
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        key, equals, _ = line.partition("=")
        if not equals or _ENV_KEY.fullmatch(key) is None:
            return f"line {number} is not KEY=value with a key of A-Z, 0-9 and _"
    return None


def complaints(files: Mapping[str, bytes]) -> dict[str, str]:
    """What is wrong with each of these files; those that are fine are not in it."""
    found = ((name, file_complaint(name, content)) for name, content in files.items())
    return {name: words for name, words in found if words is not None}


# The cryptography library is loaded where a file needs it: agents have little memory.


def _crt(content: bytes) -> str | None:
    from cryptography import x509

    try:
        x509.load_pem_x509_certificates(content)
    except ValueError:
        return "no certificate in PEM form"
    return None


def _pub(content: bytes) -> str | None:
    if b"-----BEGIN PUBLIC KEY-----" not in content:
        return "no PUBLIC KEY block in PEM form"
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        serialization.load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        return "the PUBLIC KEY block holds no public key"
    return None


def _key(content: bytes) -> str | None:
    if b"-----BEGIN PRIVATE KEY-----" not in content:
        return "no PRIVATE KEY block in PEM form"
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    try:
        serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return "the PRIVATE KEY block holds no private key"
    return None


def _json(content: bytes) -> str | None:
    try:
        json.loads(content)
    except (ValueError, RecursionError) as error:
        return f"no JSON: {error}"
    return None


CONTENT_RULES: Final[Mapping[str, ContentRule]] = {
    ".env": ContentRule(words="KEY=value lines", complaint=_env),
    ".crt": ContentRule(words="a PEM certificate", complaint=_crt),
    ".pub": ContentRule(words="a PEM public key", complaint=_pub),
    ".key": ContentRule(words="a PEM private key", complaint=_key),
    ".json": ContentRule(words="JSON", complaint=_json),
}
CRYPTOGRAPHIC: Final = frozenset({".crt", ".pub", ".key"})
"""Extensions whose contents take the cryptography library to check."""
