"""An instances server as the command line uses it: its owner's socket, its operator listener, or REST.

Whoever may open the server's own socket is its owner, and gets a short-lived operator's certificate
there for each command; anyone else uses the token of a context, or brings the identity folder that the
server's owner made. As in `client`, gRPC is never called on the main thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import click
import grpc
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.empty_pb2 import Empty

from fleetplane.cli.clients.client import CHANNEL_OPTIONS, STREAM_EVENTS_LIMIT, WAIT_SLICE_SECONDS, away
from fleetplane.cli.clients.identity_files import IdentityFiles, renewal_at
from fleetplane.cli.clients.owner_client import OwnerClient, OwnerConnection
from fleetplane.cli.clients.rest_client import connect
from fleetplane.client.places import Place, is_remote, owner_directory, resolve
from fleetplane.gen.fleetplane.admin.v1 import authority_pb2, authority_pb2_grpc
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2 as admin_pb2
from fleetplane.gen.fleetplane.admin.v1 import instances_pb2_grpc as admin_grpc
from fleetplane.gen.nstance.v1 import operator_pb2, operator_pb2_grpc
from fleetplane.kernel.errors import (
    FailedPrecondition,
    IntegrityError,
    InvalidArgument,
    NotFound,
)

CALLS = "/v1/instances/calls"
HERE_ONLY = ("ExportAuthority", "ImportAuthority")
"""Methods that servers do not offer to those who are elsewhere."""
LOOK_SECONDS = 1.0
OWNER = "local"
"""The operator as which the server's owner acts."""
OWNER_SECONDS = 3600.0
"""How long the owner's certificate lasts: longer than any command waits, and made anew to reconnect."""


class AdminClient(OwnerClient):
    stub = admin_grpc.InstancesAdminStub


class AuthorityClient(OwnerClient):
    stub = authority_pb2_grpc.AuthorityAdminStub


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorIdentity:
    """What an operator needs to be let in."""

    authority_pem: bytes
    key_pem: bytes
    certificate_pem: bytes

    @classmethod
    def load(cls, folder: Path) -> OperatorIdentity:
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

    identity: OperatorIdentity
    public_pem: bytes
    operator_id: str
    operator_address: str
    expires_at: str


def make_identity(admin: Calls, *, tenant: str, operator_id: str, life_seconds: float) -> Made:
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
        identity=OperatorIdentity(
            authority_pem=answer.authority_pem, key_pem=key_pem, certificate_pem=answer.certificate_pem
        ),
        public_pem=public_pem,
        operator_id=answer.operator_id,
        operator_address=answer.operator_address,
        expires_at=answer.expires_at.ToJsonString(),
    )


class Calls(Protocol):
    """Somebody who can be asked by the methods of one service; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def call(self, method: str, request: Any) -> Any: ...


class Operator(Calls, Protocol):
    """An operator of one tenant."""

    address: str

    def groups(self) -> list[operator_pb2.GroupStatus]: ...

    def streams(self, *methods: str, seconds: float | None) -> Iterator[Any]: ...


def admin_client(place: Place) -> Calls:
    """Whoever administers instances: the owner at the server's socket, anyone else with a token."""
    if is_remote(place):
        return RemoteCallClient(place, "admin", admin_pb2.DESCRIPTOR.services_by_name["InstancesAdmin"])
    return AdminClient(owner_directory(place), call_seconds=place.timeout)


def authority_client(place: Place) -> Calls:
    """Whoever replaces the authority."""
    if is_remote(place):
        return RemoteCallClient(
            place, "authority", authority_pb2.DESCRIPTOR.services_by_name["AuthorityAdmin"]
        )
    return AuthorityClient(owner_directory(place), call_seconds=place.timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTarget:
    """Which server, and as whom: with an identity folder, with a token, or here as the server's owner."""

    place: Place
    tenant: str
    address: str | None = None
    identity_dir: Path | None = None

    @property
    def call_seconds(self) -> float:
        """How long one call may take."""
        return self.place.timeout

    def admin(self) -> Calls:
        """As whoever administers instances."""
        return admin_client(self.place)

    def operator(self) -> Operator:
        """As an operator of the tenant."""
        if self.identity_dir is not None:
            if self.address is None:
                raise InvalidArgument("--identity-dir needs --address, the operator listener's host:port")
            return self._of_folder(self.address, self.identity_dir)
        if is_remote(self.place):
            return RemoteOperator(self.place, self.tenant)
        with self.admin() as admin:
            made = make_identity(admin, tenant=self.tenant, operator_id=OWNER, life_seconds=OWNER_SECONDS)
        address = self.address or made.operator_address
        if not address:
            raise FailedPrecondition("the server has no operator listener", hint="--address names one")
        return OperatorClient(address, made.identity, call_seconds=self.call_seconds)

    def _of_folder(self, address: str, folder: Path) -> OperatorClient:
        """An operator with an identity folder, whose certificate is renewed when half of its life is over."""
        operator = OperatorClient(address, OperatorIdentity.load(folder), call_seconds=self.call_seconds)
        files = IdentityFiles(folder)
        if datetime.now(UTC) < renewal_at(files.certificate()):
            return operator
        try:
            with operator:
                request = operator_pb2.RenewCertificateRequest(public_key_pem=files.public_key_pem())
                answer = operator.call("RenewCertificate", request)
            files.keep(certificate_pem=answer.client_certificate_pem, authority_pem=answer.authority_pem)
        except (grpc.RpcError, OSError) as error:  # what is left of its life may do for this command
            click.echo(f"fleetplane: the certificate in {folder} was not renewed: {error}", err=True)
        return OperatorClient(address, OperatorIdentity.load(folder), call_seconds=self.call_seconds)


class RemoteCallClient:
    """The methods of one service, over REST with a token."""

    def __init__(self, place: Place, service: str, descriptor: Any, *, tenant: str = "") -> None:
        self._service = service
        self._descriptor = descriptor
        self._client = connect(place, headers={"x-tenant-id": tenant} if tenant else {})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._service}>"

    def __enter__(self) -> Self:
        self._client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def call(self, method: str, request: Any) -> Any:
        """The answer of a method, as over gRPC; raises what the server refused with."""
        from google.protobuf import json_format
        from google.protobuf.message_factory import GetMessageClass

        if method in HERE_ONLY:
            raise InvalidArgument(
                "private keys are not sent to and from elsewhere", hint="on the server's machine: --data-dir"
            )
        body = {"request": json_format.MessageToDict(request, preserving_proto_field_name=True)}
        told = self._client.call("POST", f"{CALLS}/{self._service}/{method}", body=body)
        made = GetMessageClass(self._descriptor.methods_by_name[method].output_type)()
        try:
            return json_format.ParseDict(told["response"], made, ignore_unknown_fields=True)
        except (json_format.ParseError, KeyError, TypeError) as error:
            raise IntegrityError(f"the server's answer is no {made.DESCRIPTOR.name}: {error}") from error


class RemoteOperator(RemoteCallClient):
    """An operator of one tenant, over REST with a token."""

    def __init__(self, place: Place, tenant: str) -> None:
        descriptor = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
        super().__init__(place, "operator", descriptor, tenant=tenant)
        self.address = str(resolve(place))

    def groups(self) -> list[operator_pb2.GroupStatus]:
        """The tenant's groups."""
        return list(self.call("ListGroups", Empty()).groups)

    def streams(self, *methods: str, seconds: float | None) -> Iterator[Any]:
        """Changes of groups, seen by looking once a second; nothing else is followed over REST."""
        if "WatchGroups" not in methods:
            raise InvalidArgument(
                "from elsewhere only groups are followed here",
                hint="`fleetplane watch instances` and `fleetplane logs -f group/NAME` do the rest",
            )
        deadline = None if seconds is None else time.monotonic() + seconds
        known: dict[str, operator_pb2.GroupStatus] = {}
        while deadline is None or time.monotonic() < deadline:
            present = {group.key: group for group in self.groups()}
            for key in sorted(known.keys() - present.keys()):
                yield operator_pb2.GroupEvent(group=known[key], type=operator_pb2.GroupEvent.TYPE_DELETE)
            for key, group in present.items():
                if known.get(key) != group:
                    yield operator_pb2.GroupEvent(group=group, type=operator_pb2.GroupEvent.TYPE_UPSERT)
            known = present
            time.sleep(LOOK_SECONDS)


class OperatorClient(OwnerConnection):
    """An operator, at the operator listener."""

    def __init__(self, address: str, identity: OperatorIdentity, *, call_seconds: float) -> None:
        self.address = address.removeprefix("https://")
        trust = grpc.ssl_channel_credentials(
            identity.authority_pem, identity.key_pem, identity.certificate_pem
        )
        channel = grpc.secure_channel(self.address, trust, options=CHANNEL_OPTIONS)
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
