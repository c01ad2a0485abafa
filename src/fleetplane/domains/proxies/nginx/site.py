"""What rendering must know of the machine: where things are, and what its NGINX can do. Values only."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fleetplane.domains.proxies.nginx.paths import DEFAULT_DOCUMENT_ROOTS, PathPolicy, never_fault
from fleetplane.kernel.errors import SettingsError

SOCKET_PATH_LIMIT: Final = 100
"""A Unix socket's path has room for 108 bytes, and NGINX ends it with a zero."""
TYPED_OPTIONS: Final = "typed-options"
"""Among an agent's capabilities: it knows the further options of hosts, locations and upstreams."""
LACKS: Final = "lacks-"
"""Begins a capability that names what this NGINX cannot do, such as `lacks-http3`."""
OBSERVES: Final = "observes"
"""Among an agent's capabilities: it was started beside another NGINX, and can take it over."""
STREAMS: Final = "streams"
"""Among an agent's capabilities: it knows streams, and its NGINX can serve them."""
VALIDATES_TYPED: Final = "validates-typed"
"""Among an agent's capabilities: it tries virtual hosts and upstreams beside what it serves."""
_OF_STREAM: Final = re.compile(r"stream(?:_|$)")
_VERSION: Final = re.compile(r"nginx version: \S+?/(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """An NGINX program and what it was built with."""

    path: Path
    version: tuple[int, int, int]
    modules: frozenset[str]
    plus: bool = False
    """Whether it is the commercial one, which can do more."""
    stream_module: Path | None = None
    """The file of the stream module, where it is not part of the program."""

    @classmethod
    def parse(cls, path: Path, text: str) -> Binary:
        """From the output of `nginx -V`."""
        found = _VERSION.search(text)
        if found is None:
            raise SettingsError(f"{path} does not print the version of NGINX", hint=text[:200])
        major, minor, patch = (int(number) for number in found.groups())
        modules = frozenset(re.findall(r"--with-([a-z0-9_]+?)(?:_module)?(?==|\s|$)", text))
        plus = "nginx-plus" in text.partition("configure arguments")[0]
        apart = _stream_file(text)
        if apart is not None and not apart.is_file():
            modules, apart = frozenset(one for one in modules if not _OF_STREAM.match(one)), None
        return cls(path=path, version=(major, minor, patch), modules=modules, plus=plus, stream_module=apart)

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

    @property
    def stream(self) -> bool:
        """Whether it passes on TCP and UDP."""
        return "stream" in self.modules

    @property
    def stream_sni(self) -> bool:
        """Whether it reads the name that a TLS handshake asks for."""
        return self.stream and "stream_ssl_preread" in self.modules

    def capabilities(self) -> tuple[str, ...]:
        optional = {
            "http2": self.http2,
            "http3": self.http3,
            "tls": "http_ssl" in self.modules,
            STREAMS: self.stream,
        }
        names = [name for name, present in optional.items() if present]
        lacking = [f"{LACKS}{name}" for name, present in self.features().items() if not present]
        own = ("websocket", "active-health-checks", VALIDATES_TYPED, TYPED_OPTIONS)
        return (*names, *own, *lacking, f"nginx-{self.words}")

    def features(self) -> dict[str, bool]:
        """What typed options may need of an NGINX, and whether this one has it."""
        return {
            "http2": self.http2,
            "http3": self.http3,
            "tls": "http_ssl" in self.modules,
            "realip": "http_realip" in self.modules,
            "auth-request": "http_auth_request" in self.modules,
            "brotli": any("brotli" in module for module in self.modules),
            "slow-start": self.plus,
            "stream": self.stream,
            "stream-sni": self.stream_sni,
        }


def _stream_file(text: str) -> Path | None:
    """Where the stream module lies; None where it is part of the program, or there is none."""
    folder = re.search(r"--modules-path=(\S+)", text)
    if folder is None or not re.search(r"--with-stream=dynamic(?:\s|$)", text):
        return None
    return Path(folder[1]) / "ngx_stream_module.so"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The agent's folders."""

    state: Path
    """The agent's alone: its credential, the releases with their keys, the journal."""
    work: Path | None = None
    """Where NGINX's workers, as another user, reach logs and scratch files. None: inside the state directory,
    for a worker of the agent's own user, from whom nothing can be kept there."""

    def __post_init__(self) -> None:
        if len(str(self.socket).encode()) > SOCKET_PATH_LIMIT:
            raise SettingsError(
                f"{self.socket} is too long for a Unix socket", hint="choose a shorter state directory"
            )

    @property
    def folders(self) -> tuple[Path, ...]:
        """Everything that is the agent's."""
        return (self.state,) if self.work is None else (self.state, self.work)

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
    def takeover(self) -> Path:
        """Whose NGINX serves, where the agent found one."""
        return self.state / "takeover.json"

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
        return (self.work or self.state) / "logs"

    @property
    def access_log(self) -> Path:
        return self.logs / "access.log"

    @property
    def error_log(self) -> Path:
        return self.logs / "error.log"

    @property
    def users(self) -> Path:
        """Files of users and passwords, a folder for each release; workers read them with each request."""
        return (self.work or self.state) / "users"

    @property
    def temporary(self) -> Path:
        return (self.work or self.state) / "tmp"


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
    ca_bundle: Path | None = None
    """The authorities that this machine trusts."""
    workers: str = "auto"

    document_roots: tuple[Path, ...] = tuple(map(Path, DEFAULT_DOCUMENT_ROOTS))
    """The only folders that files are served from; the node's owner's choice."""

    @property
    def files(self) -> PathPolicy:
        return PathPolicy(
            roots=tuple(os.path.realpath(root) for root in self.document_roots),
            agent_folders=tuple(os.path.realpath(folder) for folder in self.paths.folders)
            + tuple(str(folder) for folder in self.paths.folders),
            agent_files=tuple(
                str(one)
                for one in (self.mime_types, self.ca_bundle, self.binary.stream_module)
                if one is not None
            ),
            resolve=os.path.realpath,
        )

    worker_user: str = ""
    """The user that workers run as; empty where NGINX is not root and cannot change its user."""

    def check_document_roots(self) -> None:
        """Refuse roots that no node should serve from, before anything is started."""
        for root in self.document_roots:
            folder = os.path.realpath(root)
            if not root.is_absolute():
                raise SettingsError(f"--document-root: {root} must be an absolute path")
            if fault := never_fault(folder, self.files.agent_folders):
                raise SettingsError(
                    f"--document-root: {fault}", hint="name a folder of web pages, such as /var/www"
                )

    def listen(self, port: int) -> list[str]:
        return [f"{address}:{self.ports.get(port, port)}" for address in self.addresses]
