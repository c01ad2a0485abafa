"""The order of messages in which files arrive, as a table.

A patch is any number of files followed by one message with nothing but the hash that they bring
the machine to. Only that message makes them count. Anything out of order means that the two
sides no longer agree about where one patch ends and the next begins, so the stream is given
up and a new one starts clean: what had arrived of an unfinished patch is forgotten.

    state    file     repeated file   stamped file      commit            muddled   end of stream
    EMPTY    OPEN     -               EMPTY, complete   EMPTY, complete   broken    clean
    OPEN     OPEN     broken          broken            EMPTY, complete   broken    broken

A commit without files is complete too: it moves the hash when no file differs. Servers of the first
generation stamp every file with the hash and send no commit: such a file is a patch of its own. If not all
of them arrive, the server sees from the report which are missing. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fleetplane.kernel.errors import FailedPrecondition

PATCH_FILES_LIMIT: Final = 1024
PATCH_BYTES_LIMIT: Final = 64 * 1024 * 1024
"""Sixteen messages of the largest size; a patch is held in memory until it is complete."""


class PatchBroken(FailedPrecondition):
    """The messages of a patch came in an order that has no meaning."""

    reason = "PATCH_BROKEN"


class PatchState(StrEnum):
    EMPTY = "empty"
    OPEN = "open"


class Input(StrEnum):
    FILE = "file"
    REPEATED = "a second file of the same name"
    STAMPED = "a file with a hash of its own"
    COMMIT = "commit"
    MUDDLED = "a message that is neither file nor commit"
    END = "the end of the stream"


class FileAction(StrEnum):
    KEEP = "keep"
    ALONE = "complete with this one file"
    COMPLETE = "complete"
    BREAK = "break"
    FINISH = "finish"


TRANSITIONS: Final = {
    (PatchState.EMPTY, Input.FILE): (PatchState.OPEN, FileAction.KEEP),
    (PatchState.EMPTY, Input.STAMPED): (PatchState.EMPTY, FileAction.ALONE),
    (PatchState.EMPTY, Input.COMMIT): (PatchState.EMPTY, FileAction.COMPLETE),
    (PatchState.EMPTY, Input.MUDDLED): (PatchState.EMPTY, FileAction.BREAK),
    (PatchState.EMPTY, Input.END): (PatchState.EMPTY, FileAction.FINISH),
    (PatchState.OPEN, Input.FILE): (PatchState.OPEN, FileAction.KEEP),
    (PatchState.OPEN, Input.REPEATED): (PatchState.EMPTY, FileAction.BREAK),
    (PatchState.OPEN, Input.STAMPED): (PatchState.EMPTY, FileAction.BREAK),
    (PatchState.OPEN, Input.COMMIT): (PatchState.EMPTY, FileAction.COMPLETE),
    (PatchState.OPEN, Input.MUDDLED): (PatchState.EMPTY, FileAction.BREAK),
    (PatchState.OPEN, Input.END): (PatchState.EMPTY, FileAction.BREAK),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One message, as far as its meaning depends on what is set."""

    filename: str = ""
    content: bytes = b""
    dated: bool = False
    config_hash: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    files: dict[str, bytes]
    config_hash: str


class PatchReader:
    """Gathers one stream's messages into patches."""

    def __init__(self) -> None:
        self.state = PatchState.EMPTY
        self._files: dict[str, bytes] = {}
        self._size = 0

    def __repr__(self) -> str:
        return f"<PatchReader {self.state} files={len(self._files)} bytes={self._size}>"

    def take(self, transfer: Transfer) -> FilePatch | None:
        """The patch that this message completes, if it does."""
        kind = self._classify(transfer)
        match self._move(kind):
            case FileAction.KEEP:
                self._keep(transfer)
                return None
            case FileAction.ALONE:
                return FilePatch(
                    files={transfer.filename: transfer.content}, config_hash=transfer.config_hash
                )
            case FileAction.COMPLETE:
                patch = FilePatch(files=self._files, config_hash=transfer.config_hash)
                self._forget()
                return patch
            case _:
                self._forget()
                raise PatchBroken(f"{kind} came while the patch was {self.state}: {_describe(transfer)}")

    def end(self) -> None:
        """The stream is over; inside a patch that is an error."""
        held = len(self._files)
        if self._move(Input.END) is FileAction.BREAK:
            self._forget()
            raise PatchBroken(f"the stream ended after {held} files without a commit")

    def _classify(self, transfer: Transfer) -> Input:
        if transfer.config_hash:
            return _stamped(transfer)
        if not transfer.filename:
            return Input.MUDDLED
        return Input.REPEATED if transfer.filename in self._files else Input.FILE

    def _move(self, kind: Input) -> FileAction:
        self.state, action = TRANSITIONS[self.state, kind]
        return action

    def _keep(self, transfer: Transfer) -> None:
        self._files[transfer.filename] = transfer.content
        self._size += len(transfer.content)
        if len(self._files) > PATCH_FILES_LIMIT or self._size > PATCH_BYTES_LIMIT:
            self.state = PatchState.EMPTY
            self._forget()
            raise PatchBroken(f"a patch has at most {PATCH_FILES_LIMIT} files and {PATCH_BYTES_LIMIT} bytes")

    def _forget(self) -> None:
        self._files = {}
        self._size = 0


def _stamped(transfer: Transfer) -> Input:
    """What a message with a hash is: a commit, a whole file of the first generation, or neither."""
    if not (transfer.filename or transfer.content or transfer.dated):
        return Input.COMMIT
    return Input.STAMPED if transfer.filename and (transfer.content or transfer.dated) else Input.MUDDLED


def _describe(transfer: Transfer) -> str:
    parts = [
        f"filename {transfer.filename!r}" if transfer.filename else "no filename",
        f"{len(transfer.content)} bytes",
        f"hash {transfer.config_hash!r}" if transfer.config_hash else "no hash",
    ]
    return ", ".join(parts)
