"""The NGINX that was found on the machine: read on request, never changed."""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import re
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from fleetplane.domains.proxies.agent.nginx.http_get import StubStatus, get_tcp, parse_stub_status
from fleetplane.domains.proxies.agent.nginx.running import run
from fleetplane.domains.proxies.agent.observing.configuration import (
    ConfigurationFile,
    ObservedConfiguration,
    Parsed,
    ReadingPolicy,
    inside,
    read_configuration,
)
from fleetplane.domains.proxies.agent.observing.origin import (
    NginxOrigin,
    NginxRunner,
    Origin,
    find,
    workers_of,
)
from fleetplane.domains.proxies.nginx.site import Binary
from fleetplane.domains.proxies.sealed_answers import seal_pair
from fleetplane.gen.nxmesh.agent.v1 import agent_pb2 as pb
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound
from fleetplane.node import safe_open
from fleetplane.node.short_lived import call_elsewhere

PAGE_CHARACTERS: Final = 48_000
"""Of what is shown at once: the server keeps 64 KiB of an answer."""
PACKED_LIMIT: Final = 16 * PAGE_CHARACTERS
TAIL_BYTES: Final = 40_000
LINES_LIMIT: Final = 1000
ASK_SECONDS: Final = 1.0
PEM_LIMIT: Final = 256 * 1024
_PEM: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]{1,40}-----\n(?:[A-Za-z0-9+/=]{1,80}\n){1,2000}-----END [A-Z0-9 ]{1,40}-----"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPaths:
    """Where a program was built to look for its files."""

    prefix: Path
    config: Path
    pid: Path
    logs: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> BuiltPaths:
        """From the output of `nginx -V`."""
        told = dict(re.findall(r"--([a-z-]+)=(\S+)", text))
        prefix = Path(told.get("prefix", "/usr/local/nginx"))
        return cls(
            prefix=prefix,
            config=prefix / told.get("conf-path", "conf/nginx.conf"),
            pid=prefix / told.get("pid-path", "logs/nginx.pid"),
            logs=tuple(
                str(prefix / told[one])
                for one in ("http-log-path", "error-log-path")
                if told.get(one, "stderr") != "stderr"
            ),
        )


async def built(program: Path) -> BuiltPaths:
    _, output = await run(str(program), "-V")
    return BuiltPaths.parse(output)


@dataclass(frozen=True, slots=True, kw_only=True)
class NginxLook:
    """What was so when somebody looked."""

    configuration: ObservedConfiguration
    origin: Origin | None
    """None while it does not run."""
    pid_file: Path
    workers: int


class ObservedNginx:
    def __init__(
        self,
        *,
        place: NginxOrigin,
        built_in: BuiltPaths,
        binary: Binary,
        policy: ReadingPolicy,
        clock: Clock,
        sends_keys: bool = False,
    ) -> None:
        """`sends_keys`: the node's owner permits that certificates are sent with their keys."""
        self._sends_keys = sends_keys
        self._parsed: Parsed = {}
        self._place = place
        self._built = built_in
        self._binary = binary
        self._policy = policy
        self.runner = NginxRunner(place, clock)

    def __repr__(self) -> str:
        return f"<ObservedNginx {self._place.config}>"

    async def look(self) -> NginxLook:
        return await asyncio.to_thread(self._look)

    def _look(self) -> NginxLook:
        configuration, self._parsed = read_configuration(self._place.config, self._policy, self._parsed)
        pid_file = self._built.prefix / configuration.pid if configuration.pid else self._built.pid
        origin = find(self._place, pid_file, configuration.ports)
        return NginxLook(
            configuration=configuration,
            origin=origin,
            pid_file=pid_file,
            workers=workers_of(origin) if origin is not None else 0,
        )

    def serves(self, origin: Origin, pid_file: Path) -> bool:
        """Whether it runs, and listens on all that it listened on."""
        ports = [int(one.rpartition(":")[2]) for one in origin.listening]
        found = find(self._place, pid_file, ports)
        return found is not None and set(origin.listening) <= set(found.listening)

    async def figures(self, look: NginxLook) -> StubStatus | None:
        """NGINX's own figures, where its configuration has a page for them."""
        if look.origin is None:
            return None
        pages = [one for one in look.configuration.status_pages if _listens(look.origin, one.address)]
        for page in pages[:4]:
            answer = await get_tcp(
                page.address, page.path, host=page.host, timeout=ASK_SECONDS, with_body=True
            )
            if answer is not None and (found := parse_stub_status(answer.body)) is not None:
                return found
        return None

    def told(self, look: NginxLook) -> pb.Observation:
        """Without whose it is, which is not seen by looking."""
        configuration, origin = look.configuration, look.origin
        return pb.Observation(
            config_path=str(configuration.path),
            nginx_version=self._binary.words,
            modules=sorted({*self._binary.modules, *configuration.loaded})[:64],
            workers=look.workers,
            listening=origin.listening if origin is not None else (),
            files=len(configuration.files),
            bytes=configuration.size,
            digest=configuration.digest,
            problems=configuration.problems,
            logs=self._logs(configuration),
            unit=origin.unit if origin is not None else "",
        )

    def _logs(self, configuration: ObservedConfiguration) -> list[str]:
        named = [str(self._built.prefix / one) for one in configuration.logs]
        return list(dict.fromkeys([*named, *self._built.logs]))[:64]

    # Showing.

    async def page(self, number: int) -> str:
        """One page of the configuration, packed; every page says of which configuration it is."""
        look = await self.look()
        shown = [ConfigurationFile(path=path, text=text) for path, text in look.configuration.files.items()]
        packed = await asyncio.to_thread(
            lambda: base64.b64encode(zlib.compress(msgspec.json.encode(shown))).decode()
        )
        if len(packed) > PACKED_LIMIT:
            raise InvalidArgument(
                f"the configuration is too large to be shown: {look.configuration.size} bytes", field="page"
            )
        pages = -(-len(packed) // PAGE_CHARACTERS)
        part = packed[number * PAGE_CHARACTERS : (number + 1) * PAGE_CHARACTERS]
        told = {"digest": look.configuration.digest, "pages": pages, "data": part}
        return msgspec.json.encode(told).decode()

    async def tail(self, name: str, lines: int) -> str:
        """The end of a log that the configuration names."""
        look = await self.look()
        if name not in self._logs(look.configuration):
            raise NotFound(f"{name} is no log of the observed NGINX")
        return await asyncio.to_thread(_tail, Path(name), lines, self._policy.log_roots(self._place.config))

    async def certificate(self, name: str, seal_to: bytes) -> str:
        """A certificate of the configuration with its key, which only whoever asked can read."""
        if not self._sends_keys:
            raise FailedPrecondition(
                "the owner of this node does not let private keys leave it", hint="see --observed-keys"
            )
        configuration = (await self.look()).configuration
        if name not in configuration.certificates:
            raise NotFound(f"{name} is no certificate of the observed NGINX")
        folder = self._place.config.parent
        pair = [folder / name, folder / configuration.certificates[name]]
        chain, key = await asyncio.to_thread(_pems, *pair)
        try:
            sealed = await asyncio.to_thread(call_elsewhere, seal_pair, chain, key, seal_to)
        except ValueError as error:
            raise InvalidArgument(f"{name} is not sent: {error}", field="certificate") from error
        return base64.b64encode(sealed).decode()


def _listens(origin: Origin, address: str) -> bool:
    """Whether an address is the found NGINX's own: a configuration can name that of any machine."""
    host, _, port = address.rpartition(":")
    hosts = {"127.0.0.1": (host, "0.0.0.0"), "[::1]": (host, "[::]")}.get(host, (host,))  # noqa: S104
    return any(f"{one}:{port}" in origin.listening for one in hosts)


def _pems(chain: Path, key: Path) -> tuple[str, str]:
    """The blocks of both files, and nothing else that may be in them: a configuration can name any file."""
    chains = [one for one in _blocks(chain) if one.startswith("-----BEGIN CERTIFICATE-----")]
    keys = [one for one in _blocks(key) if "PRIVATE KEY" in one and "ENCRYPTED" not in one]
    if not chains or len(keys) != 1:
        raise InvalidArgument(f"{chain} and {key} are no certificate with its key", field="certificate")
    return "\n".join([*chains, ""]), f"{keys[0]}\n"


def _blocks(path: Path) -> list[str]:
    try:
        with safe_open.file(Path(os.path.realpath(path)), os.O_RDONLY) as descriptor:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidArgument(f"{path} is no ordinary file", field="certificate")
            text = os.read(descriptor, PEM_LIMIT).decode("ascii", errors="replace")
            text = text.replace("\r\n", "\n")
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    return _PEM.findall(text)


def _tail(path: Path, lines: int, roots: Sequence[str]) -> str:
    """What is opened is what was resolved and permitted: links may appear in its folders meanwhile."""
    resolved = Path(os.path.realpath(path.parent), path.name)
    if not inside(str(resolved), roots):
        raise InvalidArgument(
            f"{path} is outside the folders that may be shown", field="log", hint="see --observed-folder"
        )
    try:
        with safe_open.file(resolved, os.O_RDONLY) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise _no_log(path)
            before = max(0, status.st_size - TAIL_BYTES)
            found = os.pread(descriptor, TAIL_BYTES, before).decode(errors="replace").splitlines()
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _no_log(path) from error
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    whole = found[1:] if before else found
    return "\n".join(whole[-min(max(lines, 1), LINES_LIMIT) :])


def _no_log(path: Path) -> InvalidArgument:
    return InvalidArgument(f"{path} is a link or no ordinary file", field="log")
