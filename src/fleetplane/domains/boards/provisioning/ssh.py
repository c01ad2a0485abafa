"""Commands on a board over SSH. No connection is made to a host whose key is unknown.

Passwords, keys and what goes to standard input are never logged. What a command prints is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fleetplane.domains.boards.provisioning.secrets import SshCredential
from fleetplane.kernel.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)

if TYPE_CHECKING:
    import asyncssh

CONNECT_SECONDS = 30.0
KEEPALIVE_SECONDS = 30.0
OUTPUT_LIMIT = 256 * 1024
"""Kept of what one command prints, its end; the rest is only passed on line by line."""
LINE_LIMIT = 4096

Line = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandPrinted:
    """How a command ended."""

    exit_code: int
    output: str
    """Both streams, as they came; only the end of what is long."""
    stdout: str


class SshSession(Protocol):
    async def run(
        self, command: str, *, seconds: float, stdin: str = "", line: Line | None = None
    ) -> CommandPrinted:
        """Run one command to its end; each line of output is passed on as it is printed."""
        ...


class Dial(Protocol):
    def __call__(
        self, address: str, credential: SshCredential, host_keys: Sequence[str]
    ) -> contextlib.AbstractAsyncContextManager[SshSession]:
        """A connection to a board, for as long as it is needed; `host_keys` are those it joined with."""
        ...


@contextlib.asynccontextmanager
async def dial(
    address: str, credential: SshCredential, host_keys: Sequence[str] = ()
) -> AsyncIterator[SshSession]:
    """Over a real network.

    The host's key must be among those that the credential knows for this address, and, for a board that
    joined with keys of its own, among those as well: neither a board that names another machine's
    address nor a machine that took over a board's address is logged in to.
    """
    import asyncssh  # when it is first needed: it takes as long to load as a twentieth of the server

    try:
        known = _believed(asyncssh.import_known_hosts(credential.known_hosts), host_keys)
        keys = [asyncssh.import_private_key(credential.private_key)] if credential.private_key else []
    except (asyncssh.KeyImportError, ValueError) as error:
        raise InvalidArgument(f"the credential cannot be used: {error}", field="credential_ref") from error
    try:
        opened = await asyncssh.connect(
            address,
            credential.port,
            username=credential.user,
            known_hosts=known,
            client_keys=keys,
            password=credential.password or None,
            agent_path=None,
            config=None,
            connect_timeout=CONNECT_SECONDS,
            login_timeout=CONNECT_SECONDS,
            keepalive_interval=KEEPALIVE_SECONDS,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise FailedPrecondition(
            f"the key of {address} is not one that is known: nothing was sent to it",
            hint="it must be among the credential's known hosts and among those the board joined with;"
            " add it to the former once you have compared it, or let the board join again",
            details={"cause": "host_key"},
        ) from error
    except asyncssh.PermissionDenied as error:
        raise PermissionDenied(
            f"{credential.user} may not log in at {address}", details={"cause": "ssh_login"}
        ) from error
    except (OSError, asyncssh.Error) as error:
        raise Unavailable(f"{address} cannot be reached over SSH: {error}") from error
    async with opened:
        yield SshConnection(opened, address)


def _believed(known: asyncssh.SSHKnownHosts, host_keys: Sequence[str]) -> Callable[..., Any]:
    """The host keys to believe: known to the credential, and to the board's record if it has any."""
    pinned = {_key_part(line) for line in host_keys}

    def match(host: str, addr: str, port: int | None) -> Any:
        trusted, authorities, revoked, *rest = known.match(host, addr, port)
        if pinned:
            trusted = [key for key in trusted if _key_part(key.export_public_key().decode()) in pinned]
            authorities = []  # a certified key would not be one of those that the board has
        return (trusted, authorities, revoked, *rest)

    return match


def _key_part(line: str) -> str:
    """Type and key of a public key's line, without its comment."""
    return " ".join(line.split()[:2])


class SshConnection:
    def __init__(self, connection: asyncssh.SSHClientConnection, address: str) -> None:
        self._connection = connection
        self._address = address

    def __repr__(self) -> str:
        return f"<SshConnection {self._address}>"

    async def run(
        self, command: str, *, seconds: float, stdin: str = "", line: Line | None = None
    ) -> CommandPrinted:
        import asyncssh

        told = line or (lambda _text: None)
        both, out = _PrintedEnd(), _PrintedEnd()
        try:
            async with asyncio.timeout(seconds), self._process(command) as process:
                if stdin:
                    process.stdin.write(stdin)
                process.stdin.write_eof()
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_read(process.stdout, (both, out), told))
                    tasks.create_task(_read(process.stderr, (both,), told))
                done = await process.wait(check=False)
        except TimeoutError as error:
            raise Unavailable(f"a command took longer than {seconds:g} s at {self._address}") from error
        except (OSError, asyncssh.Error) as error:
            raise Unavailable(f"the connection to {self._address} broke: {error}") from error
        code = done.exit_status if done.exit_status is not None else -1
        return CommandPrinted(exit_code=code, output=both.text, stdout=out.text)

    @contextlib.asynccontextmanager
    async def _process(self, command: str) -> AsyncIterator[asyncssh.SSHClientProcess[str]]:
        """A command that is not left running when nobody waits for it any more."""
        import asyncssh

        process = await self._connection.create_process(
            command, stdin=asyncssh.PIPE, encoding="utf-8", errors="replace"
        )
        try:
            yield process
        except BaseException:
            with contextlib.suppress(OSError):  # the connection may be what broke
                process.kill()
            raise
        finally:
            process.close()


class _PrintedEnd:
    """The end of what was printed."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, more: str) -> None:
        self.text = (self.text + more)[-OUTPUT_LIMIT:]


async def _read(stream: asyncssh.SSHReader[str], into: tuple[_PrintedEnd, ...], told: Line) -> None:
    rest = ""
    while more := await stream.read(8192):
        for kept in into:
            kept.add(more)
        *lines, rest = (rest + more).split("\n")
        for text in lines:
            told(text[:LINE_LIMIT])
        if len(rest) > LINE_LIMIT:
            told(rest[:LINE_LIMIT])
            rest = ""
    if rest:
        told(rest)
