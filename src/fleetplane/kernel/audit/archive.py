"""Old entries of the audit chain, in files of their own beside the database or wherever they are taken.

A file holds a stretch of the chain as it was, line by line, compressed, and ends with a signed checkpoint of
its last entry. The entry that tells of the archiving has the file's digest, so that an archive can be
held against the chain, and the chain goes on from the archive's last hash.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fleetplane.kernel.audit.chain import Row
from fleetplane.kernel.errors import IntegrityError

DIRECTORY = "audit"
"""In the data directory."""
_NAME = re.compile(r"audit-(\d{12})-(\d{12})\.jsonl\.gz")
LINE_LIMIT = 64 * 1024 * 1024


class Archived(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    hash: str
    entry: str


_LINES = msgspec.json.Decoder(Archived)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    path: Path
    first: int
    last: int

    def rows(self) -> Iterator[Row]:
        try:
            with gzip.open(self.path, "rb") as file:
                for line in file:
                    if line.startswith(b"["):  # else it is the checkpoint at its end
                        found = _LINES.decode(line)
                        yield Row(seq=found.seq, hash=bytes.fromhex(found.hash), entry=found.entry.encode())
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
            raise IntegrityError(f"the archive {self.path} is damaged: {error}") from error

    def digest(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()


def write(directory: Path, rows: Sequence[Row], checkpoint: bytes) -> Archive:
    """Keep a stretch of the chain, whole or not at all."""
    directory.mkdir(mode=0o700, exist_ok=True)
    first, last = rows[0].seq, rows[-1].seq
    path = directory / f"audit-{first:012d}-{last:012d}.jsonl.gz"
    staging = path.with_suffix(".new")
    descriptor = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
            for row in rows:
                made = Archived(seq=row.seq, hash=row.hash.hex(), entry=row.entry.decode())
                packed.write(msgspec.json.encode(made) + b"\n")
            packed.write(checkpoint + b"\n")
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return Archive(path=path, first=first, last=last)


def found(directory: Path) -> list[Archive]:
    """All that are there, in order; of two that begin alike, the longer."""
    by_first: dict[int, Archive] = {}
    for path in sorted(directory.glob("audit-*.jsonl.gz")) if directory.is_dir() else []:
        if (match := _NAME.fullmatch(path.name)) is not None:
            one = Archive(path=path, first=int(match[1]), last=int(match[2]))
            if one.first not in by_first or by_first[one.first].last < one.last:
                by_first[one.first] = one
    return [by_first[first] for first in sorted(by_first)]
