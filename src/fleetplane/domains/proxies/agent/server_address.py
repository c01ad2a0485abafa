"""The connection to the server. TLS always, unless somebody insisted: private keys travel on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from fleetplane.domains.proxies.agent.credential import Credential
from fleetplane.node import link
from fleetplane.node.link import LinkLost, LinkOptions, ServerRefused, ServerTrust

OPTIONS: Final = LinkOptions(
    message_bytes=16 * link.MIB,
    refusals=frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}),
)


class TokenSuperseded(LinkLost):
    """Another stream was opened with our token: by ourselves, or by a copy of us somewhere."""

    reason = "SUPERSEDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    address: str
    authority: Path | None = None
    """CA certificates to verify the server against; else the system's."""
    plaintext: bool = False

    def channel(self, credential: Credential | None = None) -> grpc.aio.Channel:
        """A connection, with the certificate of a credential that has one."""
        if self.plaintext:
            return link.channel(self.address, link.PLAINTEXT, OPTIONS)
        key = certificate = None
        if credential is not None and credential.certificate_pem:
            key, certificate = credential.key_pem.encode(), credential.certificate_pem.encode()
        trust = ServerTrust(
            roots_pem=link.roots_from(self.authority), key_pem=key, certificate_pem=certificate
        )
        return link.channel(self.address, trust, OPTIONS)


def translated(error: grpc.aio.AioRpcError) -> LinkLost | ServerRefused:
    if error.code() is grpc.StatusCode.ABORTED:
        return TokenSuperseded(link.words(error))
    return link.translated(error, OPTIONS)
