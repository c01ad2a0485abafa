"""A configuration with its includes as a tree. Reads files, changes nothing.

Included files are found and bounded here, not by the parser: a few lines that include each other twice would
otherwise become more statements than any machine holds.
"""

from __future__ import annotations

import glob
import posixpath
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol

from fleetplane.kernel.errors import InvalidArgument

FILES_LIMIT: Final = 2_000
"""Different files; a server with a file for each of 500 sites has a quarter of it."""
BYTES_LIMIT: Final = 16 << 20
"""Of all files together: 500 sites of 32 KiB."""
INCLUDES_LIMIT: Final = 20_000
"""Inclusions, those of the same file counted each time."""
STATEMENTS_LIMIT: Final = 200_000
"""After inclusion: 500 sites of 400 statements."""
DEPTH_LIMIT: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A directive, with its block if it has one."""

    name: str
    arguments: tuple[str, ...]
    file: str
    line: int
    block: tuple[Statement, ...] | None = field(default=None)

    @property
    def words(self) -> str:
        return " ".join((self.name, *self.arguments))


class Files(Protocol):
    """Where the files of a configuration are."""

    def found(self, pattern: str) -> list[str]:
        """What an absolute pattern means, in order."""

    def place(self, name: str) -> Path | None:
        """Where the parser reads a file; None if it is left out."""


class OnDisk:
    """The files of this machine."""

    def found(self, pattern: str) -> list[str]:
        return sorted(glob.iglob(pattern))  # noqa: PTH207

    def place(self, name: str) -> Path | None:
        return Path(name)


class ShownFiles:
    """Files that an agent showed, by their paths on its machine; what it did not show is left out."""

    def __init__(self, texts: Mapping[str, str], folder: Path) -> None:
        """`folder` is an empty one for the parser to read from."""
        self._places: dict[str, Path] = {}
        for number, (name, text) in enumerate(texts.items()):
            self._places[name] = folder / f"{number}.conf"
            self._places[name].write_text(text)

    def found(self, pattern: str) -> list[str]:
        plain = posixpath.normpath(pattern)  # as the agent names what it showed
        return sorted(name for name in self._places if PurePosixPath(name).match(plain))

    def place(self, name: str) -> Path | None:
        return self._places.get(posixpath.normpath(name))


def read(path: Path) -> tuple[Statement, ...]:
    """Raises `InvalidArgument` for what NGINX itself would not read, and for what is too much."""
    if not path.is_file():
        raise InvalidArgument(f"{path} is not a file", field="PATH", hint="name an nginx.conf")
    return _read(path, OnDisk())


def read_shown(path: Path, texts: Mapping[str, str]) -> tuple[Statement, ...]:
    """The same of files that an agent showed."""
    with tempfile.TemporaryDirectory(prefix="fleetplane-") as folder:
        return _read(path, ShownFiles(texts, Path(folder)))


def _read(path: Path, files: Files) -> tuple[Statement, ...]:
    try:
        return tuple(_ImportReader(path, files).statements(path, ()))
    except RecursionError:
        raise InvalidArgument(f"{path} is nested too deep", field="PATH") from None


class _ImportReader:
    def __init__(self, path: Path, files: Files) -> None:
        self._path = path
        self._files = files
        self._parsed: dict[str, list[dict[str, Any]]] = {}
        self._bytes = 0
        self._includes = 0
        self._statements = 0

    def statements(self, file: Path, above: tuple[str, ...]) -> Iterator[Statement]:
        """Of a file, with what it includes in its place; `above` are the files that include it."""
        if str(file) in above:
            raise self._fault(f"{file} includes itself", hint="`nginx -t` tells which file")
        if len(above) >= DEPTH_LIMIT:
            raise self._fault(f"{file} is included through more than {DEPTH_LIMIT} files")
        yield from self._block(self._of_file(file), file, (*above, str(file)))

    def _block(self, found: list[dict[str, Any]], file: Path, above: tuple[str, ...]) -> Iterator[Statement]:
        for one in found:
            if one["directive"] == "include" and len(one["args"]) == 1:
                for included in self._included(one["args"][0]):
                    yield from self.statements(included, above)
                continue
            self._statements += 1
            if self._statements > STATEMENTS_LIMIT:
                raise self._fault(f"it has more than {STATEMENTS_LIMIT} directives, with its includes")
            block = one.get("block")
            yield Statement(
                name=one["directive"],
                arguments=tuple(one["args"]),
                file=str(file),
                line=one["line"],
                block=tuple(self._block(block, file, above)) if block is not None else None,
            )

    def _included(self, pattern: str) -> Iterator[Path]:
        """As NGINX finds them: below the folder of its configuration, those of a pattern in order."""
        whole = str(self._path.parent / pattern)
        found = self._files.found(whole) if glob.has_magic(whole) else [whole]
        for name in found:
            self._includes += 1
            if self._includes > INCLUDES_LIMIT:
                raise self._fault(f"it includes files more than {INCLUDES_LIMIT} times")
            yield Path(name)

    def _of_file(self, file: Path) -> list[dict[str, Any]]:
        import crossplane  # only where it is needed: it takes a while to load

        known = self._parsed.get(str(file))
        if known is not None:
            return known
        if len(self._parsed) >= FILES_LIMIT:
            raise self._fault(f"it has more than {FILES_LIMIT} files")
        place = self._files.place(str(file))
        if place is None:
            return []
        if not place.is_file():
            raise self._fault(f"{file} is not a file")
        self._bytes += place.stat().st_size
        if self._bytes > BYTES_LIMIT:
            raise self._fault(f"its files have more than {BYTES_LIMIT >> 20} MiB together")
        told = crossplane.parse(str(place), single=True, comments=False, check_ctx=False, check_args=False)
        if told["status"] != "ok":
            words = str(told["errors"][0]["error"]).replace(str(place), str(file))
            raise self._fault(f"cannot be read: {words}")
        made: list[dict[str, Any]] = told["config"][0]["parsed"]
        self._parsed[str(file)] = made
        return made

    def _fault(self, words: str, *, hint: str = "") -> InvalidArgument:
        return InvalidArgument(f"{self._path}: {words}", field="PATH", hint=hint)
