"""How the agent reaches the server: by gRPC's own TLS, or through a relay where that cannot verify it.

Which of the two is decided by evidence: a handshake that the server ended because it has no certificate that
this client takes. From then on connections go through `relay`.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from ssl import SSLContext
from typing import Final

import grpc.aio
import structlog

from fleetplane.domains.instances.agent.identity.folder import IdentityFolder
from fleetplane.domains.instances.agent.relay import TlsRelay, client_context
from fleetplane.node import link
from fleetplane.node.certificates import ConnectionCredentials
from fleetplane.node.link import LinkOptions, ServerTrust

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
