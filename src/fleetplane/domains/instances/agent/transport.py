"""How the agent reaches the server: by gRPC's own TLS, or through a relay where that cannot verify it.

Which of the two is decided by evidence: a handshake that the server ended because it has no certificate that
this client takes. From then on connections go through a `TlsRelay`, which speaks TLS by OpenSSL.

gRPC's library accepts no server certificate on an Ed25519 key, and servers of the first implementation have
no other. The channel then speaks plain HTTP/2 to a Unix socket of this process, in a folder that only its
user can enter, and each connection there is carried to the server over TLS 1.3. Trust is what it is
otherwise: the authority in the identity folder and nothing else, and the host that was dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from ssl import SSLContext
from typing import Final

import grpc.aio
import structlog

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.kernel.errors import FleetplaneError, SettingsError
from fleetplane.node import link
from fleetplane.node.certificates import ConnectionCredentials
from fleetplane.node.link import LinkOptions, ServerTrust

PROTOCOL: Final = "h2"
HANDSHAKE_SECONDS: Final = 10.0
CHUNK_BYTES: Final = 64 * 1024
CONNECTIONS_LIMIT: Final = 8
"""At once: a channel has one, and two while one takes the other's place."""

MakeContext = Callable[[Path], ssl.SSLContext]
"""Blocking; gets a folder of our own, for files that OpenSSL wants to read."""


def client_context(
    authority_pem: bytes, folder: Path, *, certificate_pem: bytes = b"", key_pem: bytes = b""
) -> ssl.SSLContext:
    """TLS 1.3 that trusts these authorities alone and shows the certificate, if there is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies, and compares the host
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority_pem.decode("ascii"))
    context.set_alpn_protocols([PROTOCOL])
    if certificate_pem:
        with tempfile.NamedTemporaryFile(dir=folder) as shown:  # 0600, and gone with the block
            shown.write(certificate_pem + key_pem)
            shown.flush()
            context.load_cert_chain(shown.name)
    return context


class TlsRelay:
    def __init__(self, address: str, make_context: MakeContext, *, name: str) -> None:
        self._address = address
        self._make_context = make_context
        self._name = name
        self._folder: Path | None = None
        self._open = 0

    def __repr__(self) -> str:
        return f"<TlsRelay {self._address} open={self._open}>"

    @property
    def target(self) -> str:
        """What a gRPC channel dials; nobody answers there before `run`."""
        place = self._folder / self._name if self._folder is not None else Path("/nowhere")
        return f"unix:{place}"

    async def run(self, folder: Path, log: structlog.typing.FilteringBoundLogger) -> None:
        """Carry connections until cancelled. `folder` is private to this user."""
        self._folder = folder
        self._log = log
        server = await asyncio.start_unix_server(self._carry, folder / self._name, limit=CHUNK_BYTES)
        async with server:
            await server.serve_forever()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the channel, to the server and back."""
        self._open += 1
        far_writer: asyncio.StreamWriter | None = None
        try:
            if self._open <= CONNECTIONS_LIMIT:
                far_reader, far_writer = await self._dial()
                await _both_ways((reader, far_writer), (far_reader, writer))
        except (OSError, ssl.SSLError, TimeoutError, FleetplaneError) as error:
            self._log.warning("relay_failed", address=self._address, error=str(error) or repr(error))
        finally:
            self._open -= 1
            for end in (writer, far_writer):
                if end is not None:
                    end.close()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._folder is not None
        host, port = split_target(self._address)
        context = await asyncio.to_thread(self._make_context, self._folder)
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=host, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )
        agreed = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        if agreed != PROTOCOL:
            writer.close()
            raise SettingsError(f"{self._address} speaks {agreed or 'no HTTP/2'}, not {PROTOCOL}")
        return reader, writer


def split_target(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`."""
    host, colon, port = address.removeprefix("dns:").lstrip("/").rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise SettingsError(f"{address!r} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _both_ways(*ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Until either side ends: a half of an HTTP/2 connection is of no use."""
    async with asyncio.TaskGroup() as tasks:
        pumps = [tasks.create_task(_pump(reader, writer)) for reader, writer in ways]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()


CALL_LIMIT_SECONDS: Final = 30.0
OPTIONS: Final = LinkOptions()
"""Servers of this protocol accept a ping every ten seconds, and without streams too."""
HANDSHAKE_FAILURE: Final = "HANDSHAKE_FAILURE"
"""How gRPC tells of a server that has no certificate for it."""


class InstanceTransport:
    def __init__(
        self,
        *,
        registration_address: str,
        agent_address: str,
        identity: IdentityFolder,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._addresses = (registration_address, agent_address)
        self._identity = identity
        self._log = log
        self._registration = TlsRelay(registration_address, self._anonymous, name="registration")
        self._agent = TlsRelay(agent_address, self._known, name="agent")
        self._wanted = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Transport {'relayed' if self.relayed else 'direct'}>"

    @property
    def relayed(self) -> bool:
        return self._wanted.is_set()

    def registration_channel(self, authority_pem: bytes) -> grpc.aio.Channel:
        if self.relayed:
            return _relayed(self._registration, self._addresses[0])
        return link.channel(self._addresses[0], ServerTrust(roots_pem=authority_pem), OPTIONS)

    def agent_channel(self, credentials: ConnectionCredentials) -> grpc.aio.Channel:
        if self.relayed:
            return _relayed(self._agent, self._addresses[1])
        return agent_channel(self._addresses[1], credentials)

    def learn(self, why: str) -> None:
        """Take note of why a connection failed."""
        if HANDSHAKE_FAILURE in why and not self.relayed:
            self._log.info("tls_relayed", reason="gRPC does not take the key of the server's certificate")
            self._wanted.set()

    async def run(self) -> None:
        """Carry connections, once they are to be carried; until cancelled."""
        await self._wanted.wait()
        with tempfile.TemporaryDirectory(prefix="fleetplane-") as made:  # 0700
            async with asyncio.TaskGroup() as tasks:
                for relay in (self._registration, self._agent):
                    tasks.create_task(relay.run(Path(made), self._log))

    def _anonymous(self, folder: Path) -> SSLContext:
        return client_context(self._identity.authority_pem(), folder)

    def _known(self, folder: Path) -> SSLContext:
        # Read anew for each connection: what was renewed, and whom to trust, counts from the next one on.
        shown = self._identity.credentials()
        return client_context(
            shown.authority_pem, folder, certificate_pem=shown.certificate_pem, key_pem=shown.key_pem
        )


def agent_channel(address: str, identity: ConnectionCredentials) -> grpc.aio.Channel:
    """Trusts the authority in the identity folder alone, and holds the server to the host dialled."""
    trust = ServerTrust(
        roots_pem=identity.authority_pem, key_pem=identity.key_pem, certificate_pem=identity.certificate_pem
    )
    return link.channel(address, trust, OPTIONS)


def _relayed(relay: TlsRelay, authority: str) -> grpc.aio.Channel:
    """To a relay of our own, which does the TLS."""
    return link.channel(relay.target, link.PLAINTEXT, OPTIONS, authority=authority)
