"""Registration of this node: connecting to the server, joining with a token, registering again.

A node that has only a token finds the server's authority by the fingerprint in it; channels trust only that
authority.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import grpc
import grpc.aio
import msgspec

from fleetplane.domains.boards.agent.membership import BoardIdentityFolder, Membership
from fleetplane.domains.boards.agent.metrics.values import Board
from fleetplane.domains.boards.wire import join_token
from fleetplane.domains.boards.wire.message_json import filled
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)
from fleetplane.node import link
from fleetplane.node.certificates import ConnectionCredentials
from fleetplane.node.host.psutil_host import NetworkInterface
from fleetplane.node.link import LinkOptions, ServerTrust

CALL_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 10.0
DEFAULT_PORT: Final = 9090
CHAIN_LIMIT: Final = 10


class RefusedByServer(link.ServerRefused, PermissionDenied):
    """The server answered, and its answer will be the same next time."""

    reason = "REFUSED_BY_SERVER"


class OutOfReach(link.LinkLost):
    reason = "SERVER_OUT_OF_REACH"


OPTIONS: Final = LinkOptions(
    refusals=frozenset(
        {
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.ALREADY_EXISTS,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.UNIMPLEMENTED,
        }
    ),
    lost=OutOfReach,
    refused=RefusedByServer,
)


def endpoint(address: str) -> tuple[str, int]:
    """`host:port`, `[::1]:port` or `host`."""
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = address, str(DEFAULT_PORT)
    host = host.strip("[]")
    known = not (":" in host and not _is_address(host))
    if not host or not known or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"{address!r} is no HOST:PORT", field="server")
    return host, int(port)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def canonical(address: str) -> str:
    host, port = endpoint(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def authority_behind(address: str, fingerprint: str) -> bytes:
    """The authority's certificate, in PEM, that the server shows and the fingerprint vouches for.

    Nothing is said to the server before this: whoever cannot show that certificate learns nothing. That
    the server also holds a certificate of it is proven by the connection made next.
    """
    host, port = endpoint(address)
    try:
        async with asyncio.timeout(2 * CONNECT_SECONDS):
            chain = await asyncio.to_thread(_shown_by, host, port)
    except (OSError, TimeoutError) as error:
        raise OutOfReach(f"{address} does not answer: {error or 'no answer in time'}") from error
    for der in chain:
        if hmac.compare_digest(hashlib.sha256(der).hexdigest(), fingerprint):
            return ssl.DER_cert_to_PEM_cert(der).encode()
    raise PermissionDenied(
        f"{address} is not the server that this join token is from",
        details={"cause": "fingerprint"},
        hint="see that the address is right; if it is, someone stands between",
    )


def _shown_by(host: str, port: int) -> Sequence[bytes]:
    """The certificates of a server that is not trusted with anything."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=host) as secure,
    ):
        # A method of the socket itself from Python 3.13 on.
        ask = getattr(secure, "get_unverified_chain", None)
        if ask is None:
            ask = cast("Any", secure)._sslobj.get_unverified_chain
        shown = cast("Callable[[], list[Any] | None]", ask)() or []
        return [one if isinstance(one, bytes) else _der(one) for one in shown[:CHAIN_LIMIT]]


def _der(certificate: Any) -> bytes:
    """The DER bytes of a certificate object of Python 3.11 and 3.12, which encodes PEM by default."""
    pem: str = certificate.public_bytes()
    return ssl.PEM_cert_to_DER_cert(pem)


def anonymous_channel(address: str, authority_pem: bytes, *, server_name: str = "") -> grpc.aio.Channel:
    trust = ServerTrust(roots_pem=authority_pem)
    return link.channel(canonical(address), trust, OPTIONS, server_name=server_name)


def own_channel(address: str, identity: ConnectionCredentials, *, server_name: str = "") -> grpc.aio.Channel:
    trust = ServerTrust(
        roots_pem=identity.authority_pem, key_pem=identity.key_pem, certificate_pem=identity.certificate_pem
    )
    return link.channel(canonical(address), trust, OPTIONS, server_name=server_name)


def translated(error: grpc.aio.AioRpcError) -> link.LinkLost | link.ServerRefused:
    return link.translated(error, OPTIONS)


APPROVAL_SECONDS: Final = 10.0
"""Between two questions whether somebody has approved us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSelf:
    """What this node says of itself. Blank where it does not know."""

    name: str
    ip_address: str = ""
    mac_address: str = ""
    architecture: str = ""
    model: str = ""
    serial_number: str = ""
    cpu_cores: int = 0
    memory_bytes: int = 0
    os_version: str = ""
    kernel_version: str = ""
    boot_id: str = ""
    agent_port: int = 0
    agent_version: str = ""
    capabilities: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    ssh_host_keys: tuple[str, ...] = ()
    """Public keys of this machine's SSH host."""

    def message(self, *, token: str = "", csr_pem: str = "", node_id: int = 0) -> pb.NodeRegistration:
        return filled(
            pb.NodeRegistration,
            self,
            memory=self.memory_bytes,
            join_token=token,
            csr_pem=csr_pem,
            node_id=str(node_id or ""),
            role=None,  # an operator or the token says what the board is for
            cluster_id=None,
        )

    def digest(self) -> str:
        """Changes with anything that the server should hear of."""
        return hashlib.sha256(self.message().SerializeToString(deterministic=True)).hexdigest()


def describe(
    board: Board, interfaces: tuple[NetworkInterface, ...], *, name: str, memory_bytes: int, towards: str
) -> BoardSelf:
    """From what was measured. `towards` is our address as the server sees the way to it."""
    with_address = next((one for one in interfaces if towards in one.addresses), None)
    first = next((one for one in interfaces if one.up and one.mac_address), None)
    chosen = with_address or first
    return BoardSelf(
        name=name or board.hostname,
        ip_address=towards,
        mac_address=chosen.mac_address if chosen else "",
        architecture=board.architecture,
        model=board.model,
        serial_number=board.serial_number,
        cpu_cores=board.cpu_cores,
        memory_bytes=memory_bytes,
        os_version=board.os_version,
        kernel_version=board.kernel_version,
        boot_id=board.boot_id,
    )


class Joiner:
    def __init__(self, folder: BoardIdentityFolder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Joiner {self._folder}>"

    async def join(
        self,
        token: str,
        server: str,
        me: BoardSelf,
        *,
        server_name: str = "",
        replace_identity: bool = False,
        wait_seconds: float = 0.0,
        told: Callable[[str], None] = lambda _: None,
    ) -> Membership:
        """Become a member, or raise. Asking again with the same token and key is harmless."""
        said = join_token.parse(token)
        known = await asyncio.to_thread(self._folder.load_membership)
        if known is not None and not replace_identity:
            raise AlreadyExists(
                f"this node is member {known.node_id} at {known.server}", hint="use --replace to join anew"
            )
        authority = await authority_behind(server, said.ca_fingerprint)
        csr = await asyncio.to_thread(self._folder.csr_pem)
        request = me.message(token=str(said), csr_pem=csr)
        async with anonymous_channel(server, authority, server_name=server_name) as channel:
            answer = await self._admitted(channel, request, wait_seconds, told)
        membership = Membership(
            server=canonical(server),
            server_name=server_name,
            node_id=answer.node_id,
            name=answer.node.name or me.name,
            heartbeat_seconds=max(1, answer.heartbeat_interval_seconds),
        )
        await asyncio.to_thread(self._keep, answer, membership)
        return membership

    async def _admitted(
        self,
        channel: grpc.aio.Channel,
        request: pb.NodeRegistration,
        wait_seconds: float,
        told: Callable[[str], None],
    ) -> pb.RegistrationResponse:
        give_up = self._clock.monotonic() + wait_seconds
        while True:
            answer = await register(channel, request)
            if answer.success:
                return answer
            if self._clock.monotonic() >= give_up:
                raise FailedPrecondition(
                    f"not admitted: {answer.message}",
                    details={"cause": answer.reason},
                    hint="have an operator approve this node, then join again with the same token",
                )
            told(answer.message)
            await self._clock.sleep(APPROVAL_SECONDS)

    def _keep(self, answer: pb.RegistrationResponse, membership: Membership) -> None:
        for left in (self._folder.revocations, self._folder.desired):
            left.unlink(missing_ok=True)  # of a server that this node leaves
        self._folder.store_certificate(
            answer.certificate_pem.encode(), answer.ca_certificate_pem.encode(), node_id=answer.node_id
        )
        self._folder.store_membership(membership)


class BoardRegistrar:
    """Registers a member again, when something about it has changed or its certificate grows old."""

    def __init__(self, folder: BoardIdentityFolder, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock

    def __repr__(self) -> str:
        return f"<Registrar {self._folder}>"

    async def renewal_due(self) -> bool:
        identity = await asyncio.to_thread(self._folder.credentials)
        return self._clock.now_ns() / 1e9 >= identity.life.renewal_at()

    async def update(
        self, channel: grpc.aio.Channel, me: BoardSelf, membership: Membership, *, renew: bool
    ) -> tuple[Membership, bool]:
        """The membership as it is now, and whether certificate or trust changed: then connect anew."""
        csr = await asyncio.to_thread(self._folder.csr_pem) if renew else ""
        answer = await register(channel, me.message(csr_pem=csr, node_id=membership.node_id))
        if not answer.success:
            raise Unavailable(f"not registered: {answer.message}", details={"cause": answer.reason})
        after = msgspec.structs.replace(
            membership,
            registered=me.digest(),
            name=answer.node.name or membership.name,
            heartbeat_seconds=max(1, answer.heartbeat_interval_seconds or membership.heartbeat_seconds),
        )
        changed = await asyncio.to_thread(self._keep, answer, after)
        return after, changed

    def _keep(self, answer: pb.RegistrationResponse, membership: Membership) -> bool:
        authority = answer.ca_certificate_pem.encode()
        if answer.certificate_pem:
            self._folder.store_certificate(
                answer.certificate_pem.encode(), authority, node_id=membership.node_id
            )
            changed = True
        else:
            changed = bool(authority) and self._folder.trust(authority)
        self._folder.store_membership(membership)
        return changed


async def register(channel: grpc.aio.Channel, request: pb.NodeRegistration) -> pb.RegistrationResponse:
    try:
        answer: pb.RegistrationResponse = await boards_pb2_grpc.ControlPlaneStub(channel).RegisterNode(
            request, timeout=CALL_SECONDS
        )
    except grpc.aio.AioRpcError as error:
        raise translated(error) from error
    return answer


def without_hardware(me: BoardSelf, *, serial_number: str) -> BoardSelf:
    """For a simulated node: several on one machine must not be taken for one."""
    return replace(me, mac_address="", serial_number=serial_number, model="simulated")
