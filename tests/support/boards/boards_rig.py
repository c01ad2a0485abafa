"""A boards server in this process: real store, real listeners with and without TLS, official client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fleetplane.domains.blueprint import Kernel, prepare_both, run_both
from fleetplane.domains.boards.access import LISTENER, PLAIN_LISTENER
from fleetplane.domains.boards.calls.channels import NodeLinks
from fleetplane.domains.boards.commands.courier import BoardCommander
from fleetplane.domains.boards.core import BoardCore, BoardOptions
from fleetplane.domains.boards.inventory.boards import status_of
from fleetplane.domains.boards.joining import credentials
from fleetplane.domains.boards.kinds import Board, TokenPurpose
from fleetplane.domains.boards.server import BLUEPRINT, BoardDomain
from fleetplane.gen.boards import boards_pb2 as pb
from fleetplane.gen.boards import boards_pb2_grpc
from fleetplane.gen.pi_controller import pi_controller_pb2_grpc
from fleetplane.kernel.access import Role
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.identity import Authority, MasterKey
from fleetplane.kernel.identity.operators import Operators
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.kinds import KERNEL_KINDS
from fleetplane.kernel.store import Store, StoreSettings
from fleetplane.kernel.telemetry import Telemetry
from fleetplane.rpc import CallStatistics, GrpcApp, ListenerSpec, open_listener
from fleetplane.rpc.introspection import HealthBoard
from fleetplane.server.endpoints import encrypted
from fleetplane.server.grpc_apps import compose, cut_off

DEADLINE_SECONDS = 60.0
BOSS = "operator/boss"

# How long a board's answer takes says something about the machine: who waits for one waits as for all else.
_defaults = NodeLinks.call.__kwdefaults__
assert _defaults is not None
assert "seconds" in _defaults
_defaults["seconds"] = DEADLINE_SECONDS
_reach = BoardCommander._reach


async def _reach_patiently(self: BoardCommander, board: int, patience: float) -> None:
    await _reach(self, board, max(patience, DEADLINE_SECONDS))


BoardCommander._reach = _reach_patiently  # type: ignore[method-assign]


async def until(condition: Callable[[], Any], *, seconds: float = DEADLINE_SECONDS) -> Any:
    """What the condition comes to, once that is true."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):
            await asyncio.sleep(0.005)
    return found


class BoardKey:
    """A key that never leaves the board, and the request it signs."""

    def __init__(self, key: ec.EllipticCurvePrivateKey | None = None) -> None:
        self.key = key or ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def csr(self) -> str:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "whatever it says here")])
        request = x509.CertificateSigningRequestBuilder().subject_name(name).sign(self.key, hashes.SHA256())
        return request.public_bytes(serialization.Encoding.PEM).decode()


@dataclass(slots=True, kw_only=True)
class Member:
    """A board that has been let in: its number, key, certificate and stubs over mTLS."""

    number: int
    key: BoardKey
    certificate: bytes
    control: Any
    original: Any
    channel: grpc.aio.Channel


@dataclass(slots=True, kw_only=True)
class BoardsRig:
    store: Store
    kernel: Kernel
    domain: BoardDomain
    core: BoardCore
    apps: dict[str, GrpcApp]
    address: str
    plain_address: str
    stack: AsyncExitStack = field(repr=False)

    # Channels.

    async def channel(
        self, key: BoardKey | None = None, certificate: bytes | None = None
    ) -> grpc.aio.Channel:
        trust = self.kernel.authority.trust_pem
        pair = (key.pem, certificate) if key is not None and certificate is not None else (None, None)
        secure = grpc.aio.secure_channel(self.address, grpc.ssl_channel_credentials(trust, *pair))
        return await self.stack.enter_async_context(secure)

    async def plain_channel(self) -> grpc.aio.Channel:
        # A pool of its own: connections are told apart here.
        options = [("grpc.use_local_subchannel_pool", 1)]
        insecure = grpc.aio.insecure_channel(self.plain_address, options=options)
        return await self.stack.enter_async_context(insecure)

    async def stranger(self) -> Any:
        """A stub for ControlPlane without any credentials."""
        return boards_pb2_grpc.ControlPlaneStub(await self.channel())

    async def operator(
        self, role: str = "boards.admin", *, scope: str = ""
    ) -> tuple[Any, list[tuple[str, str]]]:
        """A stub for the original service, and the metadata that goes with each call."""
        token = self.kernel.operators.session("boss", roles=[Role(role)], scope=scope, life_seconds=600)
        stub = pi_controller_pb2_grpc.PiControllerServiceStub(await self.channel())
        return stub, [("authorization", f"Bearer {token}")]

    # Members.

    async def token(self, **wanted: Any) -> str:
        made = await self.core.join_tokens.create(actor=BOSS, **wanted)
        return made.text

    async def join(self, name: str, *, key: BoardKey | None = None, **said: Any) -> Member:
        key = key or BoardKey()
        stub = await self.stranger()
        answer = await stub.RegisterNode(
            pb.NodeRegistration(
                name=name, join_token=await self.token(board_name=name), csr_pem=key.csr, **said
            )
        )
        assert answer.success, answer
        return await self.member(answer.node_id, key, answer.certificate_pem.encode())

    async def member(self, number: int, key: BoardKey, certificate: bytes) -> Member:
        channel = await self.channel(key, certificate)
        return Member(
            number=number,
            key=key,
            certificate=certificate,
            channel=channel,
            control=boards_pb2_grpc.ControlPlaneStub(channel),
            original=pi_controller_pb2_grpc.PiControllerServiceStub(channel),
        )

    async def controller(self, name: str = "second") -> Member:
        key = BoardKey()
        token = await self.token(board_name=name, purpose=TokenPurpose.CONTROLLER)
        stub = await self.stranger()
        answer = await stub.RegisterNode(pb.NodeRegistration(name=name, join_token=token, csr_pem=key.csr))
        return await self.member(0, key, answer.certificate_pem.encode())

    async def certified(self, uris: Iterable[str], name: str = "someone") -> Member:
        """Someone with a certificate of our authority that says this."""
        from fleetplane.kernel.identity import LeafProfile, LeafUsage

        key = BoardKey()
        profile = LeafProfile(usage=LeafUsage.CLIENT, common_name=name, uri=tuple(uris), ttl_hours=1)
        issued = self.kernel.authority.issue_leaf(key.key.public_key(), profile)
        return await self.member(0, key, issued.certificate_pem)

    # Looking.

    def board(self, number: int) -> Board:
        return self.core.boards.require(number)

    def state(self, number: int) -> str:
        return status_of(self.board(number)).state.value

    def serial_of(self, member: Member) -> int:
        return x509.load_pem_x509_certificate(member.certificate).serial_number

    @property
    def fingerprint(self) -> str:
        return credentials.fingerprint(self.kernel.authority)


@asynccontextmanager
async def boards_rig(
    folder: Path, *, clock: Clock | None = None, options: BoardOptions | None = None, **extras: Any
) -> AsyncIterator[BoardsRig]:
    clock = clock or SystemClock()
    options = options or BoardOptions(plain=True)
    settings = StoreSettings(path=folder / "state.db")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            Store.open(settings, kinds=[*KERNEL_KINDS, *BLUEPRINT.kinds], clock=clock)
        )
        telemetry = await stack.enter_async_context(Telemetry.open(folder / "telemetry.db", clock))
        master = MasterKey(b"k" * 32, clock)
        kernel = Kernel(
            store=store,
            clock=clock,
            calls=CallStatistics(),
            master=master,
            authority=await Authority.load_or_create(store, master, clock),
            revocations=Revocations(store, clock),
            operators=await Operators.load(store, master, clock),
            telemetry=telemetry,
        )
        await kernel.operators.offer_sessions()
        domain = BoardDomain(kernel, options, **extras)
        await prepare_both(domain)
        apps = compose([BLUEPRINT], [domain], kernel.calls, clock, HealthBoard())
        kernel.revocations.subscribe(lambda revoked: cut_off(apps.values(), revoked))
        places = {}
        for name, app in apps.items():
            spec = ListenerSpec(name=name, addresses=("127.0.0.1:0",), app=app)
            if name == LISTENER:
                plain = ListenerSpec(name=name, addresses=("127.0.0.1:0",), app=app)
                spec = encrypted(plain, kernel.authority, clients="optional")
            listener = await stack.enter_async_context(open_listener(spec, grace_seconds=1))
            places[name] = listener.addresses[0].partition("://")[2]
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run_both(domain))
            async with AsyncExitStack() as channels:
                yield BoardsRig(
                    store=store,
                    kernel=kernel,
                    domain=domain,
                    core=domain.core,
                    apps=apps,
                    address=places[LISTENER],
                    plain_address=places.get(PLAIN_LISTENER, ""),
                    stack=channels,
                )
                domain.drain()
                for app in apps.values():
                    await app.drain(1)
            running.cancel()
