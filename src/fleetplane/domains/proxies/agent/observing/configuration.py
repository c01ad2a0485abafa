"""The configuration of an NGINX that somebody else runs: read with its includes, never written.

`nginx -T` would tell the same, but opens logs, binds ports and loads modules on the way. Whoever may write
into one of its folders writes the configuration, and what is read here is shown to administrators elsewhere.
So a file is shown only if it lies in a folder that the node's owner named, wherever links lead, if it is an
ordinary file of bearable size, if it reads as configuration (`/etc/shadow` does not) and if it holds no
private key.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from fleetplane.domains.proxies.nginx.blocks import NginxBlock, Node, Unrenderable
from fleetplane.domains.proxies.nginx.reading import TEXT_LIMIT_BYTES, read
from fleetplane.node import safe_open

FILES_LIMIT: Final = 500
"""Different files: a file for each of 400 sites, and those that they share."""
BYTES_LIMIT: Final = 4 << 20
"""Of all files together: 500 of 8 KiB."""
INCLUDES_LIMIT: Final = 5_000
"""Inclusions, those of the same file counted each time."""
DEPTH_LIMIT: Final = 16
PROBLEMS_LIMIT: Final = 32
LOGS_LIMIT: Final = 64
DEFAULT_FOLDERS: Final = (Path("/usr/share/nginx"),)
"""Where distributions keep what an NGINX includes beside its own folder: the modules that it loads."""
LOG_FOLDERS: Final = (Path("/var/log"),)
_KEY: Final = re.compile(r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
_NO_FILE: Final = re.compile(r"syslog:|memory:|stderr$|off$|.*\$")


class ConfigurationFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusPage:
    """Where NGINX tells its own figures."""

    address: str
    host: str
    path: str


@dataclass(slots=True, kw_only=True)
class ObservedConfiguration:
    """What was read, and what stands out in it."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)
    """Text by path, in the order in which NGINX reads them."""
    problems: list[str] = field(default_factory=list)
    pid: str = ""
    logs: dict[str, None] = field(default_factory=dict)
    certificates: dict[str, str] = field(default_factory=dict)
    """Files of certificates, each with the file of its key, as the configuration spells them."""
    ports: set[int] = field(default_factory=set)
    """That it names in `listen`."""
    loaded: dict[str, None] = field(default_factory=dict)
    """Modules that are loaded by name."""
    status_pages: list[StatusPage] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Of everything that was read, and of what was not shown."""
        told = hashlib.sha256()
        for part in itertools.chain.from_iterable(self.files.items()):
            told.update(f"{len(part)}:".encode() + part.encode())
        for problem in self.problems:
            told.update(problem.encode())
        return told.hexdigest()

    @property
    def size(self) -> int:
        return sum(len(text.encode()) for text in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingPolicy:
    folders: tuple[Path, ...]
    """Beside the configuration's own: whose files may be shown."""

    def roots(self, config: Path) -> tuple[str, ...]:
        own = config.parent
        return tuple(os.path.realpath(one) for one in (own, *DEFAULT_FOLDERS, *self.folders))

    def log_roots(self, config: Path) -> tuple[str, ...]:
        return (*self.roots(config), *(os.path.realpath(one) for one in LOG_FOLDERS))


Parsed = dict[str, tuple[str, list[Node] | str]]
"""Files by their paths: the text, and its tree or what is wrong with it. Parsing takes a quarter of a
millisecond for each directive, and reports come twice a minute."""


def read_configuration(
    config: Path, policy: ReadingPolicy, before: Parsed | None = None
) -> tuple[ObservedConfiguration, Parsed]:
    """Read everything anew, and parse what is not among what was read `before`; for the next time.

    Never raises for what the files say: what cannot be shown is among the problems.
    """
    reader = _ConfigurationReader(config, policy, before or {})
    reader.file(config, (), ())
    return reader.made, reader.parsed


def inside(name: str, roots: Sequence[str]) -> bool:
    """Whether a path leads into one of the folders, whatever links it has."""
    found = os.path.realpath(name)
    return any(found == root or found.startswith(f"{root}/") for root in roots)


class _ConfigurationReader:
    def __init__(self, config: Path, policy: ReadingPolicy, before: Parsed) -> None:
        self._before = before
        self.parsed: Parsed = {}
        self._config = config
        self._roots = policy.roots(config)
        self._trees: dict[str, list[Node]] = {}
        self._bytes = 0
        self._includes = 0
        self._listens: list[str] = []
        self._names: list[str] = []
        self._chains: list[str] = []
        self._keys: list[str] = []
        self.made = ObservedConfiguration(path=config)

    def file(self, path: Path, above: tuple[str, ...], around: tuple[NginxBlock, ...]) -> None:
        name = str(path)
        if name in above or len(above) >= DEPTH_LIMIT:
            self._problem(name, "includes itself, or is included through too many files")
            return
        if name not in self._trees:
            self._trees[name] = self._parsed(name)
        self._walk(self._trees[name], (*above, name), around)

    def _parsed(self, name: str) -> list[Node]:
        try:
            text = self._text(name)
            found = self._tree(name, text)
        except (OSError, Unrenderable) as error:
            words = error.message if isinstance(error, Unrenderable) else error.strerror or str(error)
            self._problem(name, words)
            return []
        self.made.files[name] = text
        return found

    def _tree(self, name: str, text: str) -> list[Node]:
        known = self._before.get(name)
        if known is None or known[0] != text:
            try:
                known = text, read(text)
            except Unrenderable as error:
                known = text, error.message
        self.parsed[name] = known
        if isinstance(known[1], str):
            raise Unrenderable(known[1])
        return known[1]

    def _text(self, name: str) -> str:
        """The text of a file that may be shown; raises for any other."""
        if len(self.made.files) >= FILES_LIMIT:
            raise Unrenderable(f"is beyond the first {FILES_LIMIT} files")
        if not inside(name, self._roots):
            raise Unrenderable("is outside the folders that may be shown; see --observed-folder")
        with safe_open.file(Path(os.path.realpath(name)), os.O_RDONLY) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unrenderable("is no ordinary file")
            if status.st_size > TEXT_LIMIT_BYTES:
                raise Unrenderable(f"has more than {TEXT_LIMIT_BYTES} bytes")
            content = b""
            while len(content) <= TEXT_LIMIT_BYTES and (chunk := os.read(descriptor, TEXT_LIMIT_BYTES)):
                content += chunk
        self._bytes += len(content)
        if self._bytes > BYTES_LIMIT or len(content) > TEXT_LIMIT_BYTES:
            raise Unrenderable(f"does not fit: files of {BYTES_LIMIT >> 20} MiB together are shown")
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise Unrenderable("is no text in UTF-8") from None
        if _KEY.search(text):
            raise Unrenderable("holds a private key, which does not leave this machine")
        return text

    def _walk(self, nodes: Sequence[Node], above: tuple[str, ...], around: tuple[NginxBlock, ...]) -> None:
        for node in nodes:
            match node.name:
                case "include" if len(node.arguments) == 1:
                    for included in self._included(node.arguments[0]):
                        self.file(included, above, around)
                case "pid" if not around and node.arguments:
                    self.made.pid = node.arguments[0]
                case "load_module" if node.arguments:
                    self.made.loaded[Path(node.arguments[0]).stem] = None
                case "access_log" | "error_log" if node.arguments:
                    self._log(node.arguments[0])
                case "listen" if node.arguments:
                    self._listen(node.arguments)
                case "ssl_certificate" if node.arguments:
                    self._chains.append(node.arguments[0])
                    self._pair()
                case "ssl_certificate_key" if node.arguments:
                    self._keys.append(node.arguments[0])
                    self._pair()
                case "server_name":
                    self._names += node.arguments
                case "stub_status":
                    self._status_page(around)
            if isinstance(node, NginxBlock):
                if node.name == "server":
                    self._listens, self._names, self._chains, self._keys = [], [], [], []
                self._walk(node.body, above, (*around, node))

    def _listen(self, arguments: Sequence[str]) -> None:
        port = arguments[0].rpartition(":")[2]
        self.made.ports.add(int(port) if _is_port(port) else 80)
        if "ssl" not in arguments:
            self._listens.append(arguments[0])

    def _pair(self) -> None:
        """A server may have several certificates; the first key belongs to the first of them."""
        if self._chains and self._keys and len(self.made.certificates) < FILES_LIMIT:
            self.made.certificates[self._chains.pop(0)] = self._keys.pop(0)

    def _log(self, name: str) -> None:
        if not _NO_FILE.match(name) and len(self.made.logs) < LOGS_LIMIT:
            self.made.logs[name] = None

    def _status_page(self, around: tuple[NginxBlock, ...]) -> None:
        place = around[-1] if around else None
        if place is None or place.name != "location" or not place.arguments or not self._listens:
            return
        modifier, path = [*place.arguments] if len(place.arguments) == 2 else ["", place.arguments[0]]
        address = _local(self._listens[0])
        if modifier in ("", "=", "^~") and re.fullmatch(r"/[A-Za-z0-9._/-]*", path) and address:
            host = next((one for one in self._names if re.fullmatch(r"[a-z0-9.-]+", one)), "localhost")
            self.made.status_pages.append(StatusPage(address=address, host=host, path=path))

    def _included(self, pattern: str) -> Iterator[Path]:
        """As NGINX finds them: below the folder of its configuration, those of a pattern in order."""
        whole = os.path.normpath(self._config.parent / pattern)
        if not glob.has_magic(whole):
            found = [whole]
        else:
            fixed = itertools.takewhile(lambda part: not glob.has_magic(part), Path(whole).parts)
            if not inside(str(Path(*fixed)), self._roots):
                self._problem(whole, "is outside the folders that may be shown; see --observed-folder")
                return
            found = sorted(itertools.islice(glob.iglob(whole), INCLUDES_LIMIT))  # noqa: PTH207
        for name in found:
            self._includes += 1
            if self._includes > INCLUDES_LIMIT:
                self._problem(whole, f"is beyond the first {INCLUDES_LIMIT} inclusions")
                return
            yield Path(name)

    def _problem(self, name: str, words: str) -> None:
        told = f"{name} {words}"[:400]
        if len(self.made.problems) < PROBLEMS_LIMIT and told not in self.made.problems:
            self.made.problems.append(told)


def _local(listen: str) -> str:
    """Where this machine reaches an address of `listen`; empty for a socket in the file system."""
    if listen.startswith("unix:"):
        return ""
    host, _, port = listen.rpartition(":") if not listen.endswith("]") else (listen, "", "80")
    if not host and not port.isdecimal():  # a name or an address alone
        host, port = port, "80"
    if host in ("", "*", "0.0.0.0", "localhost"):  # noqa: S104
        host = "127.0.0.1"
    elif host == "[::]":
        host = "[::1]"
    return f"{host}:{port}" if _is_port(port) else ""


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65_536
