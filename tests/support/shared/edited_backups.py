"""Backups that were edited without the master key, as an attacker would."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

MANIFEST, MAC = "manifest.json", "manifest.mac"


def members(packed: Path) -> dict[str, bytes]:
    """What a backup holds, by name."""
    with tarfile.open(packed, mode="r:") as archive:
        return {one.name: (archive.extractfile(one) or io.BytesIO()).read() for one in archive}


def packed_of(contents: Mapping[str, bytes], *more: tarfile.TarInfo) -> bytes:
    """A tar of these files, and of members without content."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in more:
            archive.addfile(member)
    return made.getvalue()


def described(contents: Mapping[str, bytes], **about: object) -> dict[str, bytes]:
    """The same with a manifest that says so of every file."""
    manifest = msgspec.json.decode(contents[MANIFEST]) | about
    manifest["files"] = {
        name: hashlib.sha256(content).hexdigest()
        for name, content in contents.items()
        if name not in (MANIFEST, MAC)
    }
    return {**contents, MANIFEST: msgspec.json.encode(manifest)}


def of_before(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same as a release before this one would have made it."""
    plain = described(contents, format=1)
    del plain[MAC]
    return plain
