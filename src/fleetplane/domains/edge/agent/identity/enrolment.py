"""Enrolling this machine with a token: from an empty folder to one with a key, a configuration and a token.

What is there already is replaced only with `--force`; `--keep-existing` uses it if it fits. The token
says where the server is and for which tenant we come; it may name the server's key, which is then the
only one we believe. A machine without a configuration gets `first_document`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fleetplane.domains.edge.agent import endpoint as link
from fleetplane.domains.edge.agent.config import document as config
from fleetplane.domains.edge.agent.config.document import API_VERSION, BACKOFF_SECONDS, KIND, Document
from fleetplane.domains.edge.agent.identity import keyring
from fleetplane.domains.edge.agent.identity.keyring import DaemonEnrollmentClaims
from fleetplane.domains.edge.agent.identity.state_folder import StateFolder, new_key, public_bytes
from fleetplane.domains.edge.wire import envelope
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2_grpc
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.errors import FailedPrecondition, FleetplaneError, IntegrityError, Unauthenticated
from fleetplane.node.link import words
from fleetplane.node.tasks import in_thread

CONTEXT_NAMES: Final = ("zaru-free", "zaru-pro", "zaru-business", "zaru-enterprise")
"""The names that servers send commands under."""

_HEAD: Final = """\
# Written when this machine was enrolled; yours to edit from here on.
#
# Commands name a security context below. What is on its deny_list is denied; otherwise the first
# capability that permits all of a command permits it; otherwise it is refused. To limit one:
#
#   capabilities:
#     - tool_pattern: fs.*
#       path_allowlist: [/srv]
#     - tool_pattern: cmd.run
#       command_allowlist: [/usr/bin/uptime, systemctl]
#       subcommand_allowlist: [status]
#   deny_list: [fs.write]
"""


def first_document(
    *, node_id: str, tenant: str, endpoint: str, labels: dict[str, str], minimal: bool
) -> Document:
    names = CONTEXT_NAMES[:1] if minimal else CONTEXT_NAMES
    edge: dict[str, object] = {"tenant_id": tenant}
    if not minimal:
        edge["stream_reconnect_backoff_secs"] = [int(wait) for wait in BACKOFF_SECONDS]
    if labels:
        edge["capabilities"] = {"custom_labels": labels}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": f"edge-{node_id[:8]}"},
        "spec": {
            "node": {"id": node_id, "type": "edge"},
            "cluster": {
                "enabled": True,
                "role": "edge",
                "controller": {"endpoint": endpoint},
                "heartbeat_interval_secs": 30,
                "edge": edge,
            },
            "security_contexts": [
                {"name": name, "description": "", "capabilities": [{"tool_pattern": "*"}], "deny_list": []}
                for name in names
            ],
        },
    }


def render(made: Document) -> bytes:
    return (_HEAD + yaml.safe_dump(made, sort_keys=False, default_flow_style=False)).encode()


LEEWAY_SECONDS: Final = 60.0
"""Between the server's clock and ours, before we say that a token is over."""


class Existing(StrEnum):
    """What to do about a key or a configuration that is there already."""

    REFUSE = "refuse"
    FORCE = "force"
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentRequest:
    token: str
    existing: Existing = Existing.REFUSE
    minimal: bool = False
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolmentPlan:
    """What enrolling will do here; made without writing anything or asking anyone."""

    said: DaemonEnrollmentClaims
    server_key: bytes
    node_id: str
    new_key: bool
    document: config.Document
    """The configuration as it will be."""
    write_config: bool
    already: bool
    """There is a token, and what there is shall be kept: nothing is asked for."""

    def steps(self, folder: StateFolder) -> list[str]:
        if self.already:
            return [f"keep {folder.token}; the server is not asked"]
        return [
            f"make {folder.key}" if self.new_key else f"keep {folder.key}",
            f"write {folder.config}" if self.write_config else f"keep {folder.config}",
            f"enrol node {self.node_id} of tenant {self.said.tid} at {self.said.cep}",
            f"write {folder.token}",
        ]


class EnrolmentRefused(Unauthenticated):
    reason = "ENROLMENT_REFUSED"
    hint = "a token enrols one machine, once, and within minutes; ask for a new one"


def plan(folder: StateFolder, request: EnrolmentRequest, *, now: float) -> EnrolmentPlan:
    """Blocking; reads only. Raises what keeps this machine from being enrolled."""
    said = keyring.enrollment(request.token)
    if said.exp is not None and now > said.exp + LEEWAY_SECONDS:
        raise keyring.BadToken(f"the enrollment token is over since {now - said.exp:.0f} s")
    link.target(said.cep)
    key_there, config_there = folder.key.exists(), folder.config.exists()
    for path in (folder.key, folder.config):
        if path.exists() and request.existing is Existing.REFUSE:
            raise FailedPrecondition(
                f"{path} is there already", hint="--keep-existing uses it, --force replaces it"
            )
    document = folder.load_document() if config_there else {}
    node_id = _node_id(document) or said.nid or str(uuid.uuid4())
    if said.nid and said.nid != node_id:
        raise FailedPrecondition(
            f"the enrollment token is for node {said.nid}, and this machine is {node_id}",
            hint="ask for a token for this machine, or `logout --purge` what it was",
        )
    if request.existing is Existing.KEEP:
        if key_there:
            folder.load_key()  # complains about one that is none
        _check_endpoint(folder, document, said)
    fresh = not config_there or request.existing is Existing.FORCE
    if fresh:
        document = first_document(
            node_id=node_id,
            tenant=said.tid,
            endpoint=said.cep,
            labels=request.labels,
            minimal=request.minimal,
        )
    completed = _completed(document, node_id, said)
    return EnrolmentPlan(
        said=said,
        server_key=keyring.server_key(said),
        node_id=node_id,
        new_key=not key_there or request.existing is Existing.FORCE,
        document=completed,
        write_config=fresh or completed != document,
        already=request.existing is Existing.KEEP and key_there and folder.token.exists(),
    )


def _node_id(document: config.Document) -> str:
    """The id this machine had before: it keeps it when it is enrolled anew."""
    found = config.merge({"spec": {"node": {"id": ""}}}, document)
    try:
        return str(uuid.UUID(found["spec"]["node"]["id"]))  # type: ignore[index]
    except (ValueError, TypeError, KeyError, AttributeError):
        return ""


def _check_endpoint(folder: StateFolder, document: config.Document, said: DaemonEnrollmentClaims) -> None:
    if not document:
        return
    kept = config.decode(
        _completed(document, _node_id(document) or str(uuid.uuid4()), said, over=False), str(folder.config)
    )
    if kept.endpoint != said.cep:
        raise FailedPrecondition(
            f"{folder.config} names the server {kept.endpoint!r}, and the token {said.cep!r}",
            hint="--force replaces the configuration",
        )


def _completed(
    document: config.Document, node_id: str, said: DaemonEnrollmentClaims, *, over: bool = True
) -> config.Document:
    """The document with what enrolling settles, above or below what it says itself."""
    settled: config.Document = {
        "spec": {
            "node": {"id": node_id},
            "cluster": {"controller": {"endpoint": said.cep}, "edge": {"tenant_id": said.tid}},
        }
    }
    return config.merge(document, settled) if over else config.merge(settled, document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Enroller:
    folder: StateFolder
    connect: Callable[[str], grpc.aio.Channel]
    """By the endpoint that the token names."""
    clock: Clock

    async def enrol(self, request: EnrolmentRequest) -> EnrolmentPlan:
        """Carry the plan out; every step is on disk before the next, so that it can be begun again."""
        made = await in_thread(lambda: plan(self.folder, request, now=self.clock.now_ns() / 1e9))
        if made.already:
            return made
        key = await in_thread(lambda: self._prepare(request, made))
        token, server_key = await self._handshake(request, made, key)
        await in_thread(lambda: self._finish(token, server_key))
        return made

    def _prepare(self, request: EnrolmentRequest, made: EnrolmentPlan) -> Ed25519PrivateKey:
        folder = self.folder
        folder.make()
        with folder.alone():  # a running daemon's key is not replaced under it
            if made.new_key:
                folder.store_key(new_key())
            key = folder.load_key()
            folder.write(folder.enrollment, request.token.encode())
            if made.write_config:
                fresh = request.existing is Existing.FORCE or not folder.config.exists()
                text = render(made.document) if fresh else _plain(made.document)
                folder.store_document(text)
        return key

    async def _handshake(
        self, request: EnrolmentRequest, made: EnrolmentPlan, key: Ed25519PrivateKey
    ) -> tuple[str, bytes]:
        async with self.connect(made.said.cep) as channel:
            stub = cluster_pb2_grpc.NodeClusterServiceStub(channel)
            try:
                attested = await stub.AttestNode(
                    pb.AttestNodeRequest(
                        node_id=made.node_id,
                        role=pb.NODE_ROLE_EDGE,
                        public_key=public_bytes(key),
                        capabilities=pb.NodeCapabilities(),
                    ),
                    timeout=link.CALL_LIMIT_SECONDS,
                )
                earned = await stub.ChallengeNode(
                    pb.ChallengeNodeRequest(
                        challenge_id=attested.challenge_id,
                        node_id=made.node_id,
                        challenge_signature=key.sign(_challenged(request, made, key, attested)),
                        enrollment_token=request.token,
                    ),
                    timeout=link.CALL_LIMIT_SECONDS,
                )
            except grpc.aio.AioRpcError as error:
                raise _translated(error) from error
        token: str = earned.node_security_token
        said = keyring.node(token)
        if said.sub != made.node_id or (said.tid and said.tid != made.said.tid):
            raise IntegrityError("the server answered with a token of another node or tenant")
        return token, _pin(made.server_key, attested.server_public_key, earned.server_public_key)

    def _finish(self, token: str, server_key: bytes) -> None:
        self.folder.store_server_key(server_key)
        self.folder.pushed.unlink(missing_ok=True)  # whatever another enrolment was given
        self.folder.drop_next_key()
        self.folder.store_token(token)


def _challenged(
    request: EnrolmentRequest, made: EnrolmentPlan, key: Ed25519PrivateKey, attested: pb.AttestNodeResponse
) -> bytes:
    """What to sign. Never what a server chose: a nonce is shorter than anything else that is signed."""
    if len(attested.challenge_nonce) != envelope.NONCE_BYTES:
        raise IntegrityError(
            f"the server's challenge has {len(attested.challenge_nonce)} bytes, not {envelope.NONCE_BYTES}"
        )
    if not attested.bound_challenge:
        return attested.challenge_nonce
    return envelope.challenge_message(
        made.node_id,
        attested.challenge_id,
        public_key=public_bytes(key),
        nonce=attested.challenge_nonce,
        enrollment_token=request.token,
    )


def _pin(*named: bytes) -> bytes:
    """The server's key, if it names one; all who name one must name the same."""
    keys = {key for key in named if key}
    if len(keys) > 1:
        raise IntegrityError("the server's key is not the one that the enrollment token names")
    return keys.pop() if keys else b""


def _plain(document: config.Document) -> bytes:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=False).encode()


def _translated(error: grpc.aio.AioRpcError) -> FleetplaneError:
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return EnrolmentRefused(f"the server rejected the enrollment token: {words(error)}")
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION:
            return EnrolmentRefused(f"the server rejected the proof that came with it: {words(error)}")
        case _:
            return link.translated(error)


def default_folder() -> Path:
    return Path("~/.aegis/edge").expanduser()
