"""A stand-in for journalctl: prints a recorded stream as the real one would, by the arguments it was given.

    journal_double.install(folder, entries) -> the program's path

It keeps what it was called with, understands the options that a reader of the journal uses, follows the
file of entries as it grows, and complains about a cursor that it does not know.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRAM = r"""#!{python} -IS
import json, os, sys, time

HERE = {folder!r}
arguments = sys.argv[1:]
with open(HERE + "/calls", "a") as calls:
    calls.write(json.dumps(arguments) + "\n")
options = dict(part.partition("=")[::2] for part in arguments)
assert all(part.startswith("--") for part in arguments), arguments
units = [part.partition("=")[2] for part in arguments if part.startswith("--unit=")]
assert options.get("--output") == "json"


def wanted(entry):
    if "--dmesg" in options and entry.get("_TRANSPORT") != "kernel":
        return False
    if units and entry.get("_SYSTEMD_UNIT") not in units:
        return False
    if "--priority" in options and int(entry.get("PRIORITY", 6)) > int(options["--priority"]):
        return False
    at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
    if "--since" in options and at < float(options["--since"][1:]):
        return False
    if "--until" in options and at > float(options["--until"][1:]):
        return False
    return True


def lines(start):
    with open(HERE + "/entries", "rb") as file:
        file.seek(start)
        for line in file:
            if line.endswith(b"\n"):
                start += len(line)
                yield line, start


position, found, skipping = 0, [], options.get("--after-cursor", "")
for line, position in lines(0):
    try:
        entry = json.loads(line)
    except ValueError:
        found.append(line)
        continue
    if skipping:
        skipping = "" if entry["__CURSOR"] == skipping else skipping
        continue
    if wanted(entry):
        found.append(line)
if skipping:
    sys.stderr.write("Failed to seek to cursor: Invalid argument\n")
    sys.exit(1)
count = options.get("--lines", "all")
for line in found if count == "all" else found[max(0, len(found) - int(count)):]:
    sys.stdout.buffer.write(line)
sys.stdout.flush()
while "--follow" in options:
    for line, position in lines(position):
        if wanted(json.loads(line)):
            sys.stdout.buffer.write(line)
            sys.stdout.flush()
    time.sleep(0.02)
"""


class JournalDouble:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.program = folder / "journalctl"
        self.program.write_text(
            PROGRAM.replace("{python}", sys.executable).replace("{folder!r}", repr(str(folder)))
        )
        self.program.chmod(0o755)
        (folder / "entries").touch()
        (folder / "calls").touch()
        self._count = 0

    def add(self, message: Any, *, at: float = 1_700_000_000.0, **fields: Any) -> str:
        """As `journalctl -o json` writes an entry; its cursor."""
        self._count += 1
        cursor = f"s=6f1a;i={self._count:x};b=77aa;m={self._count:x};t={int(at):x};x=9{self._count:x}"
        entry = {
            "__CURSOR": cursor,
            "__REALTIME_TIMESTAMP": str(int(at * 1e6) + self._count),
            "__MONOTONIC_TIMESTAMP": "12345",
            "_BOOT_ID": "77aa",
            "MESSAGE": message,
            "PRIORITY": "6",
            "_HOSTNAME": "pi-1",
            "_PID": "4711",
            "_SYSTEMD_UNIT": "app.service",
            "_TRANSPORT": "journal",
            **fields,
        }
        self.add_raw(json.dumps(entry).encode() + b"\n")
        return cursor

    def add_raw(self, line: bytes) -> None:
        with (self.folder / "entries").open("ab") as file:
            file.write(line)

    def calls(self) -> Sequence[list[str]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]
