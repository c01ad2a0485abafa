"""What the local provider writes down about each instance, and the folder it gives it.

One directory per instance, private to its owner:

    record.json    what it was made from, and how far that went
    process.json   who runs in it; written by the process itself
    agent.log      what it says; rolled over to agent.log.1
    identity/      nonce.jwt and ca.crt, then the keys and certificate the agent makes
    keys/  recv/   the agent's

The record is there before anything is started and changes by atomic replacement, so that at any
moment a killed server leaves one of three states: `CREATING` (nobody was told that it exists),
`CREATED`, `DELETING` (on its way out, to be finished).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from fleetplane.domains.instances.providers.contract import CreateRequest
from fleetplane.domains.instances.providers.local.launch import LOG_FILE
from fleetplane.kernel.errors import InvalidArgument
from fleetplane.kernel.files import write_durably, write_synced

RECORD_FILE = "record.json"
PRIVATE = 0o600
TRASH_PREFIX = ".gone-"
INSTANCE_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class Stage(StrEnum):
    CREATING = "creating"
    CREATED = "created"
    DELETING = "deleting"


class LocalInstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as the local provider keeps it. Holds no secret: the nonce has its own file."""

    instance_id: str
    stage: Stage
    cluster: str
    shard: str
    instance_type: str
    tags: dict[str, str]
    launched_at_ns: int


class LocalRecords:
    """The instances' directories below one root. Every method blocks."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def directory(self, instance_id: str) -> Path:
        if not INSTANCE_ID.fullmatch(instance_id):
            raise InvalidArgument(f"{instance_id!r} cannot name a local instance", field="instance_id")
        return self.root / instance_id

    def open(self) -> None:
        """Make the root, and take out what was half removed or had not quite begun to be."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for entry in self.root.iterdir():
            if entry.is_dir() and (entry.name.startswith(TRASH_PREFIX) or not (entry / RECORD_FILE).exists()):
                shutil.rmtree(entry)  # without a record nothing was ever started in it

    def all(self) -> Iterator[LocalInstanceRecord]:
        for entry in sorted(self.root.iterdir()):
            if (record := self.read(entry.name)) is not None:
                yield record

    def read(self, instance_id: str) -> LocalInstanceRecord | None:
        try:
            data = (self.root / instance_id / RECORD_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return msgspec.json.decode(data, type=LocalInstanceRecord)

    def write(self, record: LocalInstanceRecord) -> None:
        directory = self.directory(record.instance_id)
        directory.mkdir(mode=0o700, exist_ok=True)
        write_durably(directory / RECORD_FILE, msgspec.json.encode(record), mode=PRIVATE)

    def furnish(self, request: CreateRequest) -> Path:
        """Give the agent its directories and what it registers with."""
        directory = self.directory(request.instance_id)
        for name in ("identity", "keys", "recv"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        write_synced(directory / "identity" / "nonce.jwt", request.nonce.encode(), mode=PRIVATE)
        write_synced(directory / "identity" / "ca.crt", request.ca_certificate.encode(), mode=PRIVATE)
        return directory

    def remove(self, instance_id: str) -> None:
        """Take the directory away at once, as far as anyone can see, then in earnest."""
        trash = self.root / f"{TRASH_PREFIX}{instance_id}"
        self.directory(instance_id).rename(trash)
        shutil.rmtree(trash)

    def roll_log(self, instance_id: str, limit_bytes: int) -> None:
        """Bound the log: past the limit it becomes the older of two. Lines written meanwhile may be lost."""
        log = self.directory(instance_id) / LOG_FILE
        try:
            if log.stat().st_size <= limit_bytes:
                return
        except FileNotFoundError:
            return
        # Copied and emptied, not renamed: the agent goes on writing into the file it has open.
        shutil.copyfile(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
