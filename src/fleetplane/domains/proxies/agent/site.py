"""What rendering must know of the machine: where things are, and what its NGINX can do. Values only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleetplane.kernel.errors import SettingsError

SOCKET_PATH_LIMIT: Final = 100
"""A Unix socket's path has room for 108 bytes, and NGINX ends it with a zero."""
_VERSION: Final = re.compile(r"nginx version: \S+?/(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """An NGINX program and what it was built with."""

    path: Path
    version: tuple[int, int, int]
    modules: frozenset[str]

    @classmethod
    def parse(cls, path: Path, text: str) -> Binary:
        """From the output of `nginx -V`."""
        found = _VERSION.search(text)
        if found is None:
            raise SettingsError(f"{path} does not say which NGINX it is", hint=text[:200])
        major, minor, patch = (int(number) for number in found.groups())
        modules = frozenset(re.findall(r"--with-([a-z0-9_]+?)(?:_module)?(?==|\s|$)", text))
        return cls(path=path, version=(major, minor, patch), modules=modules)

    @property
    def words(self) -> str:
        return ".".join(map(str, self.version))

    @property
    def http2(self) -> bool:
        return "http_v2" in self.modules

    @property
    def http2_directive(self) -> bool:
        """Newer ones say `http2 on`, older ones `listen ... http2`."""
        return self.version >= (1, 25, 1)

    @property
    def http3(self) -> bool:
        return "http_v3" in self.modules

    def capabilities(self) -> tuple[str, ...]:
        optional = {"http2": self.http2, "http3": self.http3, "tls": "http_ssl" in self.modules}
        names = [name for name, present in optional.items() if present]
        return (*names, "websocket", "active-health-checks", f"nginx-{self.words}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The agent's state directory."""

    state: Path

    def __post_init__(self) -> None:
        if len(str(self.socket).encode()) > SOCKET_PATH_LIMIT:
            raise SettingsError(
                f"{self.socket} is too long for a Unix socket", hint="choose a shorter state directory"
            )

    @property
    def lock(self) -> Path:
        return self.state / "agent.lock"

    @property
    def credential(self) -> Path:
        return self.state / "credential"

    @property
    def journal(self) -> Path:
        return self.state / "journal.json"

    @property
    def releases(self) -> Path:
        return self.state / "releases"

    @property
    def current(self) -> Path:
        return self.state / "current"

    @property
    def config(self) -> Path:
        """What the running NGINX was started with."""
        return self.current / "nginx.conf"

    @property
    def run(self) -> Path:
        return self.state / "run"

    @property
    def pid(self) -> Path:
        return self.run / "nginx.pid"

    @property
    def socket(self) -> Path:
        return self.run / "status.sock"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def access_log(self) -> Path:
        return self.logs / "access.log"

    @property
    def error_log(self) -> Path:
        return self.logs / "error.log"

    @property
    def temporary(self) -> Path:
        return self.state / "tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    paths: Paths
    binary: Binary
    addresses: tuple[str, ...] = ("0.0.0.0", "[::]")  # noqa: S104  # a proxy is there to be reached
    """What virtual hosts listen on; several at once."""
    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports served on another number, for machines where the real one is taken or not allowed."""
    acme_responder: str = ""
    """`host:port` that answers HTTP-01 challenges; a configuration may name another."""
    mime_types: Path | None = None
    workers: str = "auto"

    def listen(self, port: int) -> list[str]:
        return [f"{address}:{self.ports.get(port, port)}" for address in self.addresses]
