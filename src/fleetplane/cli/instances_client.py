"""An instances server as the command line uses it: its owner's socket, and its operator listener.

Whoever may open the server's own socket is its owner, and gets a short-lived operator's certificate
there for each command; anyone else brings the identity folder that the server's owner made. As in
`client`, gRPC is never called on the main thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.empty_pb2 import Empty

from fleetplane.cli.client import CHANNEL_OPTIONS, STREAM_EVENTS_LIMIT, WAIT_SLICE_SECONDS, away
from fleetplane.cli.owner_client import Connection, OwnerClient
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2_grpc
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2_grpc as admin_grpc
from fleetplane.gen.nstance.v1 import operator_pb2, operator_pb2_grpc
from fleetplane.kernel.errors import FailedPrecondition, InvalidArgument, NotFound

OPERATOR_OPTIONS = tuple(
    (name, value) for name, value in CHANNEL_OPTIONS if name != "grpc.min_reconnect_backoff_ms"
)
"""Those of a local socket, less the one that also bounds how long a connection may take to come up: an
operator may be a continent away from its server, and a handshake then takes longer than that."""
OWNER = "local"
"""The operator as which the server's owner acts."""
OWNER_SECONDS = 3600.0
"""How long the owner's certificate lasts: longer than any command waits, and made anew to reconnect."""


class AdminClient(OwnerClient):
    stub = admin_grpc.InstancesAdminStub


class AuthorityClient(OwnerClient):
    stub = authority_pb2_grpc.AuthorityAdminStub


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What an operator needs to be let in."""

    authority_pem: bytes
    key_pem: bytes
    certificate_pem: bytes

    @classmethod
    def load(cls, folder: Path) -> Identity:
        """The files that operators keep, by the names they keep them under."""
        found = {}
        for name in ("ca.crt", "identity.key", "identity.crt"):
            try:
                found[name] = (folder / name).read_bytes()
            except FileNotFoundError as error:
                raise NotFound(
                    f"there is no {name} in {folder}",
                    hint="`fleetplane instances operator-identity` makes one",
                ) from error
        return cls(
            authority_pem=found["ca.crt"],
            key_pem=found["identity.key"],
            certificate_pem=found["identity.crt"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An identity that the server's owner has had made."""

    identity: Identity
    public_pem: bytes
    operator_id: str
    operator_address: str
    expires_at: str


def make_identity(admin: AdminClient, *, tenant: str, operator_id: str, life_seconds: float) -> Made:
    """A key made here, and a certificate for it. The key goes nowhere."""
    key = ec.generate_private_key(ec.SECP256R1())
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    answer = admin.call(
        "CreateOperatorIdentity",
        admin_pb2.CreateOperatorIdentityRequest(
            tenant=tenant, public_key_pem=public_pem, operator_id=operator_id, life_seconds=life_seconds
        ),
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Made(
        identity=Identity(
            authority_pem=answer.authority_pem, key_pem=key_pem, certificate_pem=answer.certificate_pem
        ),
        public_pem=public_pem,
        operator_id=answer.operator_id,
        operator_address=answer.operator_address,
        expires_at=answer.expires_at.ToJsonString(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which server, and as whom: remote with an identity folder, or here as the server's owner."""

    data_dir: Path
    tenant: str
    address: str | None = None
    identity_dir: Path | None = None
    call_seconds: float

    def admin(self) -> AdminClient:
        return AdminClient(self.data_dir, call_seconds=self.call_seconds)

    def operator(self) -> OperatorClient:
        if self.identity_dir is not None:
            if self.address is None:
                raise InvalidArgument("--identity-dir needs --address, the operator listener's host:port")
            return OperatorClient(
                self.address, Identity.load(self.identity_dir), call_seconds=self.call_seconds
            )
        with self.admin() as admin:
            made = make_identity(admin, tenant=self.tenant, operator_id=OWNER, life_seconds=OWNER_SECONDS)
        address = self.address or made.operator_address
        if not address:
            raise FailedPrecondition("the server has no operator listener", hint="--address names one")
        return OperatorClient(address, made.identity, call_seconds=self.call_seconds)


class OperatorClient(Connection):
    """An operator, at the operator listener."""

    def __init__(self, address: str, identity: Identity, *, call_seconds: float) -> None:
        self.address = address.removeprefix("https://")
        trust = grpc.ssl_channel_credentials(
            identity.authority_pem, identity.key_pem, identity.certificate_pem
        )
        channel = grpc.secure_channel(self.address, trust, options=OPERATOR_OPTIONS)
        super().__init__(channel, operator_pb2_grpc.OperatorServiceStub(channel), call_seconds)

    def __repr__(self) -> str:
        return f"<OperatorClient {self.address}>"

    def groups(self) -> list[operator_pb2.GroupStatus]:
        return list(self.call("ListGroups", Empty()).groups)

    def streams(self, *methods: str, seconds: float | None) -> Iterator[Any]:
        """What several watches tell, as it comes, until one of them ends."""
        events: queue.Queue[Any] = queue.Queue(STREAM_EVENTS_LIMIT)
        calls = [self._watch(method, seconds) for method in methods]

        def read(call: Any) -> None:
            try:
                for event in call:
                    events.put(event)
                events.put(None)
            except grpc.RpcError as error:
                events.put(error)

        for call in calls:
            threading.Thread(target=read, args=(call,), name="operator-watch", daemon=True).start()
        try:
            while (event := _next(events)) is not None:
                if isinstance(event, grpc.RpcError):
                    raise event
                yield event
        finally:
            for call in calls:
                away(call.cancel)

    def _watch(self, method: str, seconds: float | None) -> Any:
        return away(lambda: getattr(self._stub, method)(Empty(), timeout=seconds))


def _next(events: queue.Queue[Any]) -> Any:
    """Wait in slices, so that an interrupt is seen at the next one."""
    while True:
        with suppress(queue.Empty):
            return events.get(timeout=WAIT_SLICE_SECONDS)
