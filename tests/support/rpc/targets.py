"""The servers that the one conformance suite runs against."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import hypercorn.asyncio
import hypercorn.config
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from support.rpc.probe import METHODS, SERVICE, ImmediateProbe, Journal, Probe, Value, service_descriptor

from fleetplane.kernel.access import AccessTable, Grant, Permission, Principal, Role
from fleetplane.kernel.clock import Clock, SystemClock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.rpc import (
    Authentication,
    CallGate,
    CallStatistics,
    Connection,
    FixedPrincipal,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    RpcLimits,
    TlsFiles,
    open_listener,
)

USE = Permission("probe.use")
USER = Role("user")
LOCAL = Principal(name="local", roles=frozenset({USER}))
ACCESS = AccessTable({USER: [Grant(permission=USE)]})
KINDS = ("tcp", "unix", "mtls", "immediate", "immediate on hypercorn", "hypercorn", "grpc.aio")
"""The immediate ones serve by the short way whatever can go it."""
OURS = KINDS[:-1]
H2CORN = KINDS[:4]


def rows(listener: str = "probe", **extra: Any) -> list[MethodRow]:
    return [
        MethodRow(
            path=f"/{SERVICE}/{name}",
            listener=listener,
            authentication=extra.get("authentication", Authentication.LOCAL),
            permission=USE,
            **{key: value for key, value in extra.items() if key != "authentication"},
        )
        for name in METHODS
    ]


def authenticate_certificate(connection: Connection) -> Principal:
    if not connection.certificates:
        raise Unauthenticated("a client certificate is needed")
    leaf = x509.load_pem_x509_certificate(connection.certificates[0].encode())
    return Principal(name=leaf.subject.rfc4514_string(), roles=frozenset({USER}))


def make_app(
    probe: object,
    table: Sequence[MethodRow] | None = None,
    *,
    limits: RpcLimits | None = None,
    statistics: CallStatistics | None = None,
    seal: bool = True,
    watch_departures: bool = False,
    clock: Clock | None = None,
    gate: CallGate | None = None,
) -> GrpcApp:
    app = GrpcApp(
        listener="probe",
        table=MethodTable(table if table is not None else rows()),
        access=ACCESS,
        authenticators={
            Authentication.LOCAL: FixedPrincipal(LOCAL),
            Authentication.ANONYMOUS: FixedPrincipal(LOCAL),
            Authentication.CERTIFICATE: authenticate_certificate,
        },
        clock=clock or SystemClock(),
        statistics=statistics or CallStatistics(),
        limits=limits,
        watch_departures=watch_departures,
        gate=gate,
    )
    app.add_service(service_descriptor(), probe)
    if seal:
        app.seal()
    return app


@dataclass(frozen=True)
class Certificates:
    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """An authority, a server for 127.0.0.1 and a client named `prober`."""
    now = dt.datetime.now(dt.UTC)
    root_key = ec.generate_private_key(ec.SECP256R1())
    root_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "probe root")])

    def issue(name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> bytes:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(root_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(root_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def write(name: str, key: ec.EllipticCurvePrivateKey, certificate: bytes) -> tuple[Path, Path]:
        (folder / f"{name}.pem").write_bytes(certificate)
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return folder / f"{name}.pem", folder / f"{name}.key"

    server_key, client_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    (folder / "root.pem").write_bytes(issue("probe root", root_key, authority=True))
    server, server_file = write("server", server_key, issue("server", server_key))
    client, client_file = write("client", client_key, issue("prober", client_key))
    return Certificates(folder / "root.pem", server, server_file, client, client_file)


class Target:
    """A running server with its client."""

    def __init__(self, kind: str, probe: Probe, open_channel: Callable[..., grpc.aio.Channel]) -> None:
        self.kind = kind
        self.journal: Journal = probe.journal
        self.open_channel = open_channel
        self.channel = open_channel()
        self.app: GrpcApp | None = None
        """Ours, when it is ours."""

    @property
    def ours(self) -> bool:
        return self.kind != "grpc.aio"

    def unary(self, channel: grpc.aio.Channel | None = None) -> Any:
        return (channel or self.channel).unary_unary(f"/{SERVICE}/Unary", **_CODECS)

    def raw_unary(self, path: str) -> Any:
        return self.channel.unary_unary(path)

    def down(self, channel: grpc.aio.Channel | None = None) -> Any:
        return (channel or self.channel).unary_stream(f"/{SERVICE}/Down", **_CODECS)

    def written(self) -> Any:
        return self.channel.unary_stream(f"/{SERVICE}/Written", **_CODECS)

    def up(self) -> Any:
        return self.channel.stream_unary(f"/{SERVICE}/Up", **_CODECS)

    def both(self) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/Both", **_CODECS)


_CODECS: dict[str, Any] = {
    "request_serializer": Value.SerializeToString,
    "response_deserializer": Value.FromString,
}


@contextlib.asynccontextmanager
async def open_target(
    kind: str, folder: Path, certificates: Certificates, limits: RpcLimits | None = None
) -> AsyncIterator[Target]:
    probe = ImmediateProbe() if kind.startswith("immediate") else Probe()
    opened = (
        _open_grpc(probe) if kind == "grpc.aio" else _open_ours(kind, probe, folder, certificates, limits)
    )
    async with opened as (channel_to, app):
        target = Target(kind, probe, channel_to)
        target.app = app
        try:
            yield target
        finally:
            probe.journal.release.set()
            await target.channel.close()


@contextlib.asynccontextmanager
async def _open_grpc(probe: Probe) -> AsyncIterator[tuple[Callable[..., grpc.aio.Channel], GrpcApp | None]]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, grpc_handlers(probe)),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield _insecure(f"127.0.0.1:{port}"), None
    finally:
        await server.stop(0)


def grpc_handlers(probe: Probe) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    codecs: dict[str, Any] = {
        "request_deserializer": Value.FromString,
        "response_serializer": Value.SerializeToString,
    }
    return {
        "Unary": grpc.unary_unary_rpc_method_handler(probe.Unary, **codecs),
        "Down": grpc.unary_stream_rpc_method_handler(probe.Down, **codecs),
        "Written": grpc.unary_stream_rpc_method_handler(probe.Written, **codecs),
        "Up": grpc.stream_unary_rpc_method_handler(probe.Up, **codecs),
        "Both": grpc.stream_stream_rpc_method_handler(probe.Both, **codecs),
    }


@contextlib.asynccontextmanager
async def _open_ours(
    kind: str, probe: Probe, folder: Path, certificates: Certificates, limits: RpcLimits | None
) -> AsyncIterator[tuple[Callable[..., grpc.aio.Channel], GrpcApp | None]]:
    authentication = Authentication.CERTIFICATE if kind == "mtls" else Authentication.LOCAL
    app = make_app(
        probe,
        rows(authentication=authentication),
        limits=limits,
        watch_departures=kind.endswith("hypercorn"),
    )
    if kind.endswith("hypercorn"):
        async with serve_hypercorn(app) as port:
            yield _insecure(f"127.0.0.1:{port}"), app
        return
    tls = TlsFiles(
        certificate=certificates.server,
        key=certificates.server_key,
        client_ca=certificates.authority,
        client_certificate="required",
    )
    spec = ListenerSpec(
        name="probe",
        addresses=(f"unix://{folder}/probe.sock",) if kind == "unix" else ("127.0.0.1:0",),
        app=app,
        tls=tls if kind == "mtls" else None,
    )
    async with open_listener(spec, grace_seconds=0.2) as listener:
        address = listener.addresses[0]
        if kind == "mtls":
            yield _secure(address.removeprefix("https://"), certificates), app
        else:
            yield _insecure(address.removeprefix("http://")), app
        await app.drain(0.0)


def _insecure(address: str) -> Callable[..., grpc.aio.Channel]:
    def open_channel(*options: tuple[str, Any]) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1), *options))

    return open_channel


def _secure(address: str, certificates: Certificates) -> Callable[..., grpc.aio.Channel]:
    credentials = grpc.ssl_channel_credentials(
        certificates.authority.read_bytes(),
        certificates.client_key.read_bytes(),
        certificates.client.read_bytes(),
    )

    def open_channel(*options: tuple[str, Any]) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(
            address, credentials, options=(("grpc.use_local_subchannel_pool", 1), *options)
        )

    return open_channel


def _with_trailers(app: GrpcApp) -> Any:
    """Hypercorn ends every response with a DATA frame, so a status alone in the headers is no legal
    answer there: move it into trailers."""

    async def adapted(scope: Any, receive: Any, send: Any) -> None:
        status: list[tuple[bytes, bytes]] = []

        async def send_adapted(event: Any) -> None:
            nonlocal status
            headers = event.get("headers", [])
            if event["type"] == "http.response.start" and any(name == b"grpc-status" for name, _ in headers):
                status = headers[2:]
                event = {**event, "headers": headers[:2], "trailers": True}
            await send(event)
            if status and event["type"] == "http.response.body":
                await send({"type": "http.response.trailers", "headers": status, "more_trailers": False})

        await app(scope, receive, send_adapted)

    return adapted


@contextlib.asynccontextmanager
async def serve_hypercorn(app: GrpcApp) -> AsyncIterator[int]:
    """The same application on another ASGI server."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listening.detach()}"]
    config.h2_max_concurrent_streams = 4096
    config.keep_alive_timeout = 600
    config.graceful_timeout = 0.2
    config.accesslog = config.errorlog = None
    port = socket.socket(fileno=int(config.bind[0][5:]))
    number = int(port.getsockname()[1])
    port.detach()
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hypercorn.asyncio.serve(_with_trailers(app), config, shutdown_trigger=stop.wait))
        try:
            yield number
            await app.drain(0.0)
        finally:
            stop.set()
