"""`aegis.cluster.v1.NodeClusterService`: parse, call, answer.

Which methods this server serves depends on its role: a worker takes no edge daemons, and a relay
forwards no executions. Who calls is proven inside each request, by signature and token; only the
operators' method is behind a bearer token.

A caller's address is read from `x-forwarded-for` only as far as proxies named in the settings wrote it:
from the right, the first address that is not such a proxy. IPv6 addresses count by their /64 network,
which is what one customer is given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

import msgspec

from fleetplane.domains.edge.access import TENANT_HEADERS, acting_for
from fleetplane.domains.edge.grpc.relay import Relay
from fleetplane.domains.edge.grpc.workers import ROLES, WorkerService, address_of, tags_of
from fleetplane.domains.edge.identity.attestation import DaemonEnrolment
from fleetplane.domains.edge.identity.challenges import EnrolmentCandidate
from fleetplane.domains.edge.identity.enrolment_tokens import EnrolmentTokens
from fleetplane.domains.edge.identity.policy import IdentityPolicy
from fleetplane.domains.edge.identity.rotation import Rotation
from fleetplane.domains.edge.kinds import PUBLIC_KEY_BYTES
from fleetplane.domains.edge.wire import messages as wire
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2 as pb
from fleetplane.kernel.errors import InvalidArgument, SettingsError
from fleetplane.kernel.values.ids import check_uuid
from fleetplane.kernel.values.times import spelled
from fleetplane.kernel.values.timestamps import timestamp
from fleetplane.rpc import CallContext
from fleetplane.web.rest.gate import OperatorCaller
from fleetplane.web.rest.routes import Answer, Headers


class EdgeStreamsPort(Protocol):
    async def connect(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """One stream of one daemon, from its hello to its end."""


FORWARDED_FIELD = "x-forwarded-for"
HOPS_LIMIT = 16
"""Addresses looked at in one chain; three proxies in a row are many."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Addresses and networks as they stand in the settings."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError as error:
            raise SettingsError(f"trusted_proxies: {text!r} is neither an address nor a network") from error
    return tuple(found)


def caller_address(peer: str, forwarded: Sequence[str], trusted: Sequence[Network]) -> str:
    """What limits per address go by; `peer` itself where it is no address, as on a local socket."""
    address = _address(peer)
    if address is None:
        return peer
    hops = [hop.strip() for value in forwarded for hop in value.split(",") if hop.strip()]
    for hop in reversed(hops[-HOPS_LIMIT:]):
        if not any(address in network for network in trusted):
            break
        nearer = _address(hop)
        if nearer is None:
            break
        address = nearer
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _address(text: str) -> Address | None:
    """With or without a port, in brackets or not."""
    text = text.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped if mapped is not None else found


TOKEN_LIMIT = 8192
"""Characters of any token in a request."""


class NodeClusterService:
    def __init__(
        self,
        *,
        policy: IdentityPolicy,
        enrolment: DaemonEnrolment,
        enrollments: EnrolmentTokens,
        rotation: Rotation,
        workers: WorkerService,
        streams: EdgeStreamsPort,
        server_public_key: bytes,
        relay: Relay | None = None,
    ) -> None:
        self._policy = policy
        self._enrolment = enrolment
        self._enrollments = enrollments
        self._rotation = rotation
        self._streams = streams
        self._relay = relay
        self._server_public_key = server_public_key
        self._trusted = networks(policy.trusted_proxies)
        self.RegisterNode = workers.RegisterNode
        self.Heartbeat = workers.Heartbeat
        self.DeregisterNode = workers.DeregisterNode
        self.RouteExecution = workers.RouteExecution
        self.ForwardExecution = workers.ForwardExecution
        self.SyncConfig = workers.SyncConfig
        self.PushConfig = workers.PushConfig
        self.ListPeers = workers.ListPeers

    # Joining.

    async def AttestNode(self, request: pb.AttestNodeRequest, context: CallContext) -> pb.AttestNodeResponse:
        if request.role == pb.NODE_ROLE_EDGE:
            self._policy.role.require_edges()
            self._enrolment.pay(self._address(context))
        challenge = await self._enrolment.attest(_candidate(request))
        return pb.AttestNodeResponse(
            challenge_nonce=challenge.nonce,
            challenge_id=challenge.challenge_id,
            server_public_key=self._server_public_key,
            bound_challenge=True,
        )

    async def ChallengeNode(
        self, request: pb.ChallengeNodeRequest, _context: CallContext
    ) -> pb.ChallengeNodeResponse:
        token = request.enrollment_token if request.HasField("enrollment_token") else None
        issued = await self._enrolment.answer(
            check_uuid(request.challenge_id, field="challenge_id"),
            check_uuid(request.node_id, field="node_id"),
            signature=request.challenge_signature,
            enrollment_token=token,
        )
        return pb.ChallengeNodeResponse(
            node_security_token=issued.token,
            expires_at=timestamp(issued.expires_at_ns),
            server_public_key=self._server_public_key,
        )

    def _address(self, context: CallContext) -> str:
        forwarded = [
            value
            for name, value in context.invocation_metadata()
            if name == FORWARDED_FIELD and isinstance(value, str)
        ]
        return caller_address(context.connection.address, forwarded, self._trusted)

    async def IssueEnrollmentToken(
        self, request: pb.IssueEnrollmentTokenRequest, context: CallContext
    ) -> pb.IssueEnrollmentTokenResponse:
        self._policy.role.require_edges()
        fields = {name.encode(): context.field(name.encode()) for name in TENANT_HEADERS}
        headers = Headers({name: value for name, value in fields.items() if value is not None})
        tenant = acting_for(OperatorCaller(principal=context.principal), headers)
        if self._relay is not None:
            return await self._passed_on(self._relay, request, tenant, context.principal.name)
        made = await self._enrollments.issue(tenant, request.issued_to, actor=context.principal.name)
        return pb.IssueEnrollmentTokenResponse(
            token=made.token,
            expires_at=spelled(made.expires_at_ns),
            controller_endpoint=made.controller_endpoint,
            qr_payload=made.shipped_hint,
            command_hint=made.shipped_hint,
        )

    async def _passed_on(
        self, relay: Relay, request: pb.IssueEnrollmentTokenRequest, tenant: str, caller: str
    ) -> pb.IssueEnrollmentTokenResponse:
        body = msgspec.json.encode({"issued_to": request.issued_to})
        answer = await relay.pass_on(
            "POST",
            "/v1/edge/enrollment-tokens",
            caller=caller,
            tenant=tenant,
            body=body,
            headers={"x-aegis-shapes": "shipped"},
        )
        assert isinstance(answer, Answer)
        made = answer.content
        names = ("token", "expires_at", "controller_endpoint", "qr_payload", "command_hint")
        return pb.IssueEnrollmentTokenResponse(**{name: made[name] for name in names})

    # Edge daemons.

    async def ConnectEdge(self, requests: AsyncIterator[bytes], context: CallContext) -> None:
        self._policy.role.require_edges()
        await self._streams.connect(requests, context)

    async def RotateEdgeKey(
        self, request: pb.RotateEdgeKeyRequest, context: CallContext
    ) -> pb.RotateEdgeKeyResponse:
        self._policy.role.require_edges()
        rotated = await self._rotation.rotate(request)
        told = wire.stated_dialect(_text(context.field(wire.DIALECT_FIELD.encode())))
        return wire.rotation_response(
            rotated.dialect(told),
            token=rotated.issued.token,
            issued_at_ns=rotated.issued.issued_at_ns,
            expires_at_ns=rotated.issued.expires_at_ns,
            overlap_seconds=rotated.overlap_seconds,
        )


def _candidate(request: pb.AttestNodeRequest) -> EnrolmentCandidate:
    node_id = check_uuid(request.node_id, field="node_id")
    role = ROLES.get(request.role)
    if role is None and request.role != pb.NODE_ROLE_EDGE:
        raise InvalidArgument("a node has one of the known roles", field="role")
    if not request.HasField("capabilities"):
        raise InvalidArgument("capabilities must be there, if only empty", field="capabilities")
    if len(request.public_key) != PUBLIC_KEY_BYTES:
        raise InvalidArgument(
            f"a public key has {PUBLIC_KEY_BYTES} bytes, not {len(request.public_key)}", field="public_key"
        )
    if len(request.enrolment_token) > TOKEN_LIMIT:
        raise InvalidArgument(f"at most {TOKEN_LIMIT} characters", field="enrolment_token")
    said = EnrolmentCandidate(
        node_id=node_id,
        public_key=request.public_key,
        role=role,
        capabilities=wire.resources_of(request.capabilities),
        tags=tags_of(request.capabilities),
        grpc_address=address_of(request.grpc_address),
        enrolment_token=request.enrolment_token,
    )
    if role is not None:
        return said
    # Anybody may say that, and it may be stored: nothing is kept that nobody asks for later.
    return EnrolmentCandidate(node_id=node_id, public_key=request.public_key, role=None)


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("latin-1")
