"""A double of the server that instances talk to, on our own gRPC layer with real TLS.

It holds what a test wants to know and does what a test tells it to; it has no opinions.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID
from google.protobuf.empty_pb2 import Empty
from support.shared.free_ports import free_port
from support.shared.throwaway_ca import ThrowawayCa

from fleetplane.gen.fleetplane.instances.v1 import renewal_pb2
from fleetplane.gen.nstance.v1 import agent_pb2, operator_pb2, registration_pb2
from fleetplane.kernel.access import AccessTable, Principal
from fleetplane.kernel.clock import SystemClock
from fleetplane.kernel.errors import Unauthenticated
from fleetplane.rpc import (
    Authentication,
    CallStatistics,
    Connection,
    GrpcApp,
    ListenerSpec,
    MethodRow,
    MethodTable,
    TlsFiles,
    open_listener,
)

INSTANCE_ID = "abc06awcb4f5hzmfey7qwt7s8a6q4"
RENEWAL = "fleetplane.instances.v1.AgentRenewal"
AGENT = "nstance.v1.AgentService"
OPERATOR = "nstance.v1.OperatorService"
REGISTRATION = "nstance.v1.RegistrationService"

Service: TypeAlias = "tuple[str, dict[str, grpc.RpcMethodHandler[Any, Any]]]"


async def until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait for a condition that nobody announces."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(0.01)


def make_nonce(
    subject: str = INSTANCE_ID,
    *,
    config_hash: str = "sha256:first",
    lasts_seconds: float = 300.0,
    starts_in_seconds: float = -5.0,
) -> str:
    """A nonce with a signature that nobody here checks."""
    now = time.time()
    claims = {
        "iss": "nstance-server",
        "sub": subject,
        "kind": "agent",
        "iat": int(now + starts_in_seconds),
        "nbf": int(now + starts_in_seconds),
        "exp": int(now + lasts_seconds),
        "config_hash": config_hash,
        "cluster_id": "test",
        "shard": "one",
        "tenant": "default",
        "jti": secrets.token_hex(8),
    }
    parts = ({"alg": "EdDSA", "typ": "JWT"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, "c2lnbmF0dXJl"])


class Stream:
    """One open server stream; what is put into its queue is sent."""

    END = object()

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.queue.put_nowait(message)

    def end(self) -> None:
        self.queue.put_nowait(self.END)

    def fail(self, code: grpc.StatusCode) -> None:
        self.queue.put_nowait(code)

    async def messages(self, context: Any) -> AsyncIterator[Any]:
        while (message := await self.queue.get()) is not self.END:
            if isinstance(message, grpc.StatusCode):
                await context.abort(message, "as the test wished")
            yield message


class InstanceServerDouble:
    def __init__(
        self, folder: Path, *, ca: ThrowawayCa | None = None, server_key: str = "p256", renews: bool = True
    ) -> None:
        self.renews = renews
        """The protocol's first server knows no renewal."""
        self.ca = ca or ThrowawayCa()
        folder.mkdir(exist_ok=True, parents=True)
        self._authority = folder / "ca.crt"
        self._authority.write_bytes(self.ca.pem)
        self._certificate, self._key = self.ca.server(folder, kind=server_key)
        # It may be started again: nobody else is to get its ports meanwhile.
        self._ports = {name: free_port() for name in ("registration", "agent", "operator")}
        self._stack = contextlib.AsyncExitStack()
        self._apps: list[GrpcApp] = []
        # What a test may set
        self.registration_faults: deque[grpc.StatusCode] = deque()
        self.lost_answers = 0
        """So many registrations are done and then not answered."""
        self.certificate_life = dt.timedelta(hours=24)
        self.certificate_started_ago = dt.timedelta(seconds=5)
        # What a test may look at
        self.registrations: list[registration_pb2.RegisterClientRequest] = []
        self.redeemed: dict[str, bytes] = {}
        self.raw_reports: list[bytes] = []
        self.report_streams = 0
        self.report_ends: list[str] = []
        self.submissions: list[agent_pb2.PublicKeysRequest] = []
        self.files: list[Stream] = []
        self.keys: list[Stream] = []
        self.renewals: list[bytes] = []
        self.groups: list[operator_pb2.GroupEvent] = []
        self.callers: set[str] = set()
        self._end_reports = asyncio.Event()

    @property
    def reports(self) -> list[agent_pb2.HealthReportRequest]:
        return [agent_pb2.HealthReportRequest.FromString(raw) for raw in self.raw_reports]

    def address(self, listener: str) -> str:
        return f"127.0.0.1:{self._ports[listener]}"

    async def start(self) -> None:
        self._end_reports = asyncio.Event()
        await self._listen("registration", self._registration(), client_certificate="none")
        agents = [self._agent(), self._renewal()] if self.renews else [self._agent()]
        await self._listen("agent", *agents, client_certificate="required")
        await self._listen("operator", self._operator(), client_certificate="required")

    async def stop(self) -> None:
        """Go away like a process that was killed: streams break off."""
        for app in self._apps:
            await app.drain(0.0)
        self._apps = []
        await self._stack.aclose()
        self.files, self.keys = [], []

    def end_reports(self) -> None:
        """End the report streams in good order."""
        self._end_reports.set()
        self._end_reports = asyncio.Event()

    async def _listen(self, name: str, *services: Service, client_certificate: Any) -> None:
        anonymous = client_certificate == "none"
        kind = Authentication.ANONYMOUS if anonymous else Authentication.CERTIFICATE
        rows = [
            MethodRow(path=f"/{path}/{method}", listener=name, authentication=kind, permission=None)
            for path, handlers in services
            for method in handlers
        ]
        app = GrpcApp(
            listener=name,
            table=MethodTable(rows),
            access=AccessTable({}),
            authenticators={
                Authentication.ANONYMOUS: lambda _: Principal(name="anyone", roles=frozenset()),
                Authentication.CERTIFICATE: self._authenticate,
            },
            clock=SystemClock(),
            statistics=CallStatistics(),
        )
        for path, handlers in services:
            app.add_registered_method_handlers(path, handlers)
        app.seal()
        tls = TlsFiles(
            certificate=self._certificate,
            key=self._key,
            client_ca=None if anonymous else self._authority,
            client_certificate=client_certificate,
        )
        spec = ListenerSpec(name=name, addresses=(self.address(name),), app=app, tls=tls)
        await self._stack.enter_async_context(open_listener(spec, grace_seconds=0.2))
        self._apps.append(app)

    def _authenticate(self, connection: Connection) -> Principal:
        if not connection.certificates:
            raise Unauthenticated("a client certificate is needed")
        leaf = x509.load_pem_x509_certificate(connection.certificates[0].encode())
        (name,) = leaf.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        self.callers.add(str(name.value))
        return Principal(name=str(name.value), roles=frozenset())

    # Registration

    def _registration(self) -> Service:
        handler = grpc.unary_unary_rpc_method_handler(
            self._register,
            request_deserializer=registration_pb2.RegisterClientRequest.FromString,
            response_serializer=registration_pb2.RegisterClientResponse.SerializeToString,
        )
        return REGISTRATION, {"RegisterAgent": handler, "RegisterOperator": handler}

    async def _register(self, request: registration_pb2.RegisterClientRequest, context: Any) -> Any:
        self.registrations.append(request)
        if self.registration_faults:
            await context.abort(self.registration_faults.popleft(), "as the test wished")
        token = request.registration_nonce_jwt
        if self.redeemed.setdefault(token, request.public_key_pem) != request.public_key_pem:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "nonce already used")
        if self.lost_answers:
            self.lost_answers -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer was lost")
        key = serialization.load_pem_public_key(request.public_key_pem)
        assert isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey)
        payload = token.split(".")[1]
        subject = json.loads(base64.urlsafe_b64decode(payload + "=="))["sub"]
        pem = self.ca.client(
            key, subject, started_ago=self.certificate_started_ago, ends_in=self.certificate_life
        )
        answer = registration_pb2.RegisterClientResponse(client_certificate_pem=pem)
        answer.expires_at.FromDatetime(x509.load_pem_x509_certificate(pem).not_valid_after_utc)
        return answer

    # Agents

    def _agent(self) -> Service:
        return AGENT, {
            "ReceiveFiles": _down(self._receive_files, Empty, agent_pb2.FileTransfer),
            "ReceiveKeyRequests": _down(self._receive_keys, Empty, agent_pb2.KeyGenerationRequest),
            "SubmitPublicKeys": grpc.unary_unary_rpc_method_handler(
                self._submit,
                request_deserializer=agent_pb2.PublicKeysRequest.FromString,
                response_serializer=Empty.SerializeToString,
            ),
            "SubmitHealthReport": grpc.stream_unary_rpc_method_handler(
                self._health, request_deserializer=bytes, response_serializer=Empty.SerializeToString
            ),
        }

    async def _receive_files(self, _: Empty, context: Any) -> AsyncIterator[Any]:
        self.files.append(stream := Stream())
        async for message in stream.messages(context):
            yield message

    async def _receive_keys(self, _: Empty, context: Any) -> AsyncIterator[Any]:
        self.keys.append(stream := Stream())
        async for message in stream.messages(context):
            yield message

    async def _submit(self, request: agent_pb2.PublicKeysRequest, context: Any) -> Empty:
        self.submissions.append(request)
        return Empty()

    async def _health(self, requests: AsyncIterator[bytes], context: Any) -> Empty:
        self.report_streams += 1
        end = asyncio.ensure_future(self._end_reports.wait())
        reading = asyncio.ensure_future(self._read_reports(requests))
        try:
            await asyncio.wait({end, reading}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                self.report_ends.append("client")
            else:
                self.report_ends.append("server")
        except asyncio.CancelledError:
            # An agent that has ended its half waits a second for us, which we may have stood still.
            await asyncio.wait({reading}, timeout=1)
            ended = reading.done() and not reading.cancelled() and reading.exception() is None
            self.report_ends.append("client" if ended else "broken")
            raise
        finally:
            end.cancel()
            reading.cancel()
        return Empty()

    async def _read_reports(self, requests: AsyncIterator[bytes]) -> None:
        async for raw in requests:
            self.raw_reports.append(bytes(raw))

    def _renewal(self) -> Service:
        handler = grpc.unary_unary_rpc_method_handler(
            self._renew,
            request_deserializer=renewal_pb2.RenewCertificateRequest.FromString,
            response_serializer=renewal_pb2.RenewCertificateResponse.SerializeToString,
        )
        return RENEWAL, {"RenewCertificate": handler}

    async def _renew(self, request: renewal_pb2.RenewCertificateRequest, context: Any) -> Any:
        self.renewals.append(request.public_key_pem)
        key = serialization.load_pem_public_key(request.public_key_pem)
        assert isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey)
        pem = self.ca.client(key, context.principal.name)
        return renewal_pb2.RenewCertificateResponse(client_certificate_pem=pem)

    # Operators

    def _operator(self) -> Service:
        return OPERATOR, {
            "ListGroups": grpc.unary_unary_rpc_method_handler(
                self._list_groups,
                request_deserializer=Empty.FromString,
                response_serializer=operator_pb2.ListGroupsResponse.SerializeToString,
            ),
            "GetInstanceStatus": grpc.unary_unary_rpc_method_handler(
                self._refuse,
                request_deserializer=operator_pb2.GetInstanceStatusRequest.FromString,
                response_serializer=operator_pb2.InstanceStatusResponse.SerializeToString,
            ),
            "WatchGroups": _down(self._watch_groups, Empty, operator_pb2.GroupEvent),
        }

    async def _list_groups(self, _: Empty, context: Any) -> operator_pb2.ListGroupsResponse:
        return operator_pb2.ListGroupsResponse(groups=[event.group for event in self.groups])

    async def _refuse(self, request: operator_pb2.GetInstanceStatusRequest, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"no instance {request.instance_id}: nenhuma à vista")

    async def _watch_groups(self, _: Empty, context: Any) -> AsyncIterator[Any]:
        for event in self.groups:
            yield event


def _down(behaviour: Any, request: Any, response: Any) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_stream_rpc_method_handler(
        behaviour, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )


@contextlib.asynccontextmanager
async def instance_server(folder: Path, **options: Any) -> AsyncIterator[InstanceServerDouble]:
    double = InstanceServerDouble(folder, **options)
    await double.start()
    try:
        yield double
    finally:
        await double.stop()


def file(name: str, content: bytes = b"KEY=value") -> agent_pb2.FileTransfer:
    message = agent_pb2.FileTransfer(filename=name, content=content)
    message.last_modified.GetCurrentTime()
    return message


def commit(config_hash: str) -> agent_pb2.FileTransfer:
    return agent_pb2.FileTransfer(config_hash=config_hash)
