"""The agent's identity: its connection to the server, its credential file, enrolment and renewal.

The registration token is exchanged for a certificate of a key that never leaves this machine. The key is
written before it is used: the server binds the agent to it, and an answer that got lost is asked for again
with the same key. The credential file also holds the token until it is exchanged, and for servers that
exchange none. The connection uses TLS unless plaintext is insisted on, because private keys travel on it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc
import grpc.aio
import msgspec
import structlog

from fleetplane.gen.fleetplane.proxies.v1 import identity_pb2 as pb
from fleetplane.gen.fleetplane.proxies.v1 import identity_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import SettingsError
from fleetplane.node import certificates, link
from fleetplane.node.certificates import Life
from fleetplane.node.identity import PrivateFolder
from fleetplane.node.link import LinkLost, LinkOptions, ServerRefused, ServerTrust
from fleetplane.node.short_lived import CallFailed, call_elsewhere


class Credential(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    token: str = ""
    """Empty once it was exchanged for a certificate: it is good for nothing then."""
    agent_id: str = ""
    """Empty before the first registration."""
    key_pem: str = ""
    certificate_pem: str = ""
    """Of the key, with its authority's; empty before the exchange."""
    exchanged: str = ""
    """The digest of the token that was exchanged, so that it is known again."""

    def __repr__(self) -> str:
        return f"<Credential of {self.agent_id or 'nobody yet'}>"

    def came_from(self, token: str) -> bool:
        return token == self.token or self.exchanged == token_digest(token)


def token_digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class CredentialFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = PrivateFolder(path.parent)

    def __repr__(self) -> str:
        return f"<CredentialFile {self._path}>"

    def load(self, given_token: str) -> Credential:
        """A token that is given counts before one that is kept: somebody wants us enrolled anew."""
        kept = self._read()
        if given_token and (kept is None or not kept.came_from(given_token)):
            return Credential(token=given_token)
        if kept is None:
            raise SettingsError(
                "there is no registration token",
                hint="give one with --token-file; it is not needed again after its first use",
            )
        return kept

    def _read(self) -> Credential | None:
        raw = self._folder.read(self._path)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=Credential)
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"{self._path} is damaged: {error}", hint="remove it and enrol anew"
            ) from error

    def store(self, credential: Credential) -> None:
        self._folder.write(self._path, msgspec.json.encode(credential))


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


CALL_SECONDS: Final = 10.0
AGAIN_SECONDS: Final = 300.0
"""Between attempts to renew one that could not be renewed."""
NOT_OFFERED: Final = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION})


R = TypeVar("R")


def is_due(credential: Credential, now: float) -> bool:
    """Whether the certificate has come to the last third of its life. Pure."""
    life = life_of(credential.certificate_pem)
    return life is None or now >= life.renewal_at()


def life_of(certificate_pem: str) -> Life | None:
    """When a certificate holds; None for a text that holds none. Pure."""
    leaf = next(iter(certificates.parse(certificate_pem.encode())), None)
    return None if leaf is None else Life.of(leaf)


class ProxyEnroller:
    def __init__(
        self,
        *,
        file: CredentialFile,
        connect: Callable[[], grpc.aio.Channel],
        hostname: str,
        clock: Clock,
        log: structlog.typing.FilteringBoundLogger,
        is_light: bool = False,
    ) -> None:
        """`connect` without a certificate: the token or the key says who we are.

        A light one looks at keys and certificates in short-lived processes.
        """
        self._file = file
        self._connect = connect
        self._hostname = hostname
        self._clock = clock
        self._log = log
        self._token_only = False
        self._tried_at: float | None = None
        self._is_light = is_light
        self._life: tuple[str, Life | None] | None = None
        """Of the certificate that was looked at last."""

    def __repr__(self) -> str:
        return f"<Enroller token_only={self._token_only}>"

    async def ready(self, credential: Credential, *, doubted: bool = False) -> Credential:
        """What to present now; raises `LinkLost` or `Refused` where there is nothing to present yet.

        `doubted`: what was presented last was not taken, so it may be time for another certificate.
        """
        if credential.certificate_pem:
            return await self._renewed(credential, doubted=doubted)
        if self._token_only or not credential.token:
            return credential
        if not credential.key_pem:
            credential = msgspec.structs.replace(credential, key_pem=await self._called(new_key))
            await asyncio.to_thread(self._file.store, credential)
        try:
            request = pb.EnrolRequest(
                token=credential.token,
                csr_pem=await self._called(request_for, credential.key_pem),
                hostname=self._hostname,
            )
            found = await self._ask("Enrol", request)
        except grpc.aio.AioRpcError as error:
            if error.code() not in NOT_OFFERED:
                raise translated(error) from error
            self._token_only = True
            self._log.info("token_not_exchanged", reason=error.details())
            return msgspec.structs.replace(credential, key_pem="")
        return await self._keep(credential, found)

    async def _renewed(self, credential: Credential, *, doubted: bool) -> Credential:
        """The old certificate is good enough for as long as no new one is to be had."""
        now = self._clock.now_ns() / 1e9
        waited = self._tried_at is None or self._clock.monotonic() - self._tried_at >= AGAIN_SECONDS
        try:
            if not waited or not (doubted or await self._is_due(credential, now)):
                return credential
            self._tried_at = self._clock.monotonic()
            csr_pem = await self._called(request_for, credential.key_pem)
            request = pb.RenewRequest(agent_id=credential.agent_id, csr_pem=csr_pem)
            found = await self._ask("Renew", request)
        except (grpc.aio.AioRpcError, LinkLost) as error:
            self._log.warning("certificate_not_renewed", error=str(error))
            return credential
        return await self._keep(credential, found)

    async def _is_due(self, credential: Credential, now: float) -> bool:
        pem = credential.certificate_pem
        if self._life is None or self._life[0] != pem:
            self._life = (pem, await self._called(life_of, pem))
        life = self._life[1]
        return life is None or now >= life.renewal_at()

    async def _called(self, function: Callable[..., R], *args: str) -> R:
        try:
            if self._is_light:
                return await asyncio.to_thread(call_elsewhere, function, *args)
        except CallFailed as error:  # the machine is short of something; it may pass
            raise LinkLost(error.message) from error
        return await asyncio.to_thread(function, *args)

    async def _ask(self, method: str, request: pb.EnrolRequest | pb.RenewRequest) -> pb.Identity:
        async with self._connect() as channel:
            stub = identity_pb2_grpc.AgentIdentityStub(channel)
            found: pb.Identity = await getattr(stub, method)(request, timeout=CALL_SECONDS)
            return found

    async def _keep(self, credential: Credential, found: pb.Identity) -> Credential:
        kept = Credential(
            agent_id=found.agent_id,
            key_pem=credential.key_pem,
            certificate_pem=found.certificate_pem,
            exchanged=credential.exchanged or token_digest(credential.token),
        )
        await asyncio.to_thread(self._file.store, kept)
        self._log.info("certificate_received", agent=kept.agent_id, expires=found.expires_at.ToJsonString())
        return kept


def new_key() -> str:
    """A private key in PEM."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return certificates.private_pem(ec.generate_private_key(ec.SECP256R1())).decode()


def request_for(key_pem: str) -> str:
    """A request for a certificate of this key, in PEM."""
    return certificates.signing_request(
        certificates.load_private_key(key_pem.encode(), "the credential file")
    )
