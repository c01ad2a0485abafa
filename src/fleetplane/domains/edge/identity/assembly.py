"""The half of the edge domain that knows who is who, put together: joining, keys, workers, the service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fleetplane.domains.blueprint import Service
from fleetplane.domains.edge import access, kinds
from fleetplane.domains.edge.grpc.node_cluster import EdgeStreamsPort, NodeClusterService
from fleetplane.domains.edge.grpc.relay import Relay
from fleetplane.domains.edge.grpc.workers import WorkerService
from fleetplane.domains.edge.identity.attestation import DaemonEnrolment
from fleetplane.domains.edge.identity.challenges import SharedChallenges
from fleetplane.domains.edge.identity.enrolment_tokens import EnrolmentTokens
from fleetplane.domains.edge.identity.policy import IdentityPolicy, ServerKey
from fleetplane.domains.edge.identity.rotation import Rotation
from fleetplane.domains.edge.identity.tokens import NodeTokens
from fleetplane.domains.edge.nodes.config_layers import ConfigLayers
from fleetplane.domains.edge.nodes.registry import Nodes
from fleetplane.domains.edge.workers.admission import WorkerAdmission
from fleetplane.domains.edge.workers.registry import EdgeWorkers
from fleetplane.fleet.people.door import Authenticators
from fleetplane.gen.aegis.cluster.v1 import cluster_pb2
from fleetplane.kernel.access import Grant, Principal, Role
from fleetplane.kernel.clock import Clock
from fleetplane.kernel.identity import MasterKey
from fleetplane.kernel.identity.revocation import Revocations
from fleetplane.kernel.identity.signing import LONGEST_LIFE_SECONDS
from fleetplane.kernel.resources import AnyKind
from fleetplane.kernel.store import Store
from fleetplane.rpc import Authentication, Authenticator, Connection, MethodRow, Needs, Rate
from fleetplane.web.rest.gate import acting

LISTENER = "edge"
EVENT_LIMIT_BYTES = 32 * 1024 * 1024
"""Of an event that is taken as a whole. Daemons in the field put a command's whole output into its result,
after they have streamed it: a larger one is cut, and keeps its outcome."""
JOIN_RATE = Rate(per_second=200.0, burst=16_384)
"""Per connected address, which may be an ingress for ten thousand daemons that come back at once."""
CALL_RATE = Rate(per_second=1000.0, burst=4096)
"""Of workers, per address: each beats every 30 s; each call costs a signature check."""
ISSUE_RATE = Rate(per_second=20.0, burst=1024)
"""Per operator; each token costs an RSA signature, about a millisecond."""
FORWARDS_LIMIT = 256
"""Executions under way at once, each with a connection of its own."""

_SERVICE = cluster_pb2.DESCRIPTOR.services_by_name["NodeClusterService"]


def _row(method: str, rate: Rate, **more: int) -> MethodRow:
    """Who calls is proven inside the request, so the connection need not."""
    return MethodRow(
        path=f"/{_SERVICE.full_name}/{method}",
        listener=LISTENER,
        authentication=Authentication.ANONYMOUS,
        permission=None,
        rate=rate,
        concurrency=more.get("concurrency"),
        max_request_bytes=more.get("max_request_bytes"),
        cut_oversized=method == "ConnectEdge",
        needs=Needs.WRITES,
    )


KINDS: Sequence[AnyKind] = kinds.KINDS
METHODS: Sequence[MethodRow] = (
    _row("AttestNode", JOIN_RATE),
    _row("ChallengeNode", JOIN_RATE),
    _row("RegisterNode", CALL_RATE),
    _row("Heartbeat", CALL_RATE),
    _row("DeregisterNode", CALL_RATE),
    _row("RouteExecution", CALL_RATE),
    _row("ForwardExecution", CALL_RATE, concurrency=FORWARDS_LIMIT),
    _row("SyncConfig", CALL_RATE),
    _row("PushConfig", CALL_RATE),
    _row("ListPeers", CALL_RATE),
    _row("ConnectEdge", JOIN_RATE, max_request_bytes=EVENT_LIMIT_BYTES),
    _row("RotateEdgeKey", JOIN_RATE),
    MethodRow(
        path=f"/{_SERVICE.full_name}/IssueEnrollmentToken",
        listener=LISTENER,
        authentication=Authentication.TOKEN,
        permission=access.ENROLL,
        rate=ISSUE_RATE,
        needs=Needs.WRITES,
    ),
)
GRANTS: Mapping[Role, Iterable[Grant]] = access.GRANTS


class IdentitySide:
    """See `load`."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        tokens: NodeTokens,
        key: ServerKey,
        revocations: Revocations,
        door: Authenticators,
        layers: ConfigLayers,
        policy: IdentityPolicy,
        challenges: SharedChallenges | None = None,
    ) -> None:
        self._door = door
        self.challenges = challenges
        self._policy = policy
        self.tokens = tokens
        self.key = key
        self.nodes = Nodes(store, clock, revocations)
        self.enrollments = EnrolmentTokens(store, clock, tokens, life_seconds=policy.enrollment_seconds)
        self.worker_admission = WorkerAdmission(store, clock, tokens, policy)
        self.enrolment = DaemonEnrolment(
            store=store,
            clock=clock,
            tokens=tokens,
            workers=self.worker_admission,
            policy=policy,
            shared=challenges,
        )
        self.rotation = Rotation(store=store, clock=clock, tokens=tokens, nodes=self.nodes, policy=policy)
        self.workers = EdgeWorkers(store, clock, tokens, policy, target=key.public_key.hex())
        self._worker_service = WorkerService(
            workers=self.workers, nodes=self.nodes, layers=layers, policy=policy, clock=clock
        )

    def __repr__(self) -> str:
        return f"<IdentitySide {self.nodes!r} {self.workers!r}>"

    @classmethod
    async def load(
        cls,
        store: Store,
        master: MasterKey,
        clock: Clock,
        *,
        revocations: Revocations,
        door: Authenticators,
        layers: ConfigLayers,
        policy: IdentityPolicy,
        issuer: str,
        endpoint: Callable[[], str],
    ) -> IdentitySide:
        """With the keys from the store, made at first use. An empty `issuer` is named after the role."""
        key = await ServerKey.load_or_create(store, master)
        tokens = await NodeTokens.load(
            store,
            master,
            clock,
            issuer=issuer or policy.role.issuer,
            endpoint=endpoint,
            server_public_key=key.public_key,
            longest_life_seconds=max(LONGEST_LIFE_SECONDS, policy.node_token_seconds),
        )
        return cls(
            store,
            clock,
            tokens=tokens,
            key=key,
            revocations=revocations,
            door=door,
            layers=layers,
            policy=policy,
            challenges=SharedChallenges(store, master) if store.shared else None,
        )

    def service(self, streams: EdgeStreamsPort, relay: Relay | None = None) -> Service:
        """The whole service, with someone to hold the streams, and the relay that has the daemons if any."""
        servicer = NodeClusterService(
            policy=self._policy,
            enrolment=self.enrolment,
            enrollments=self.enrollments,
            rotation=self.rotation,
            workers=self._worker_service,
            streams=streams,
            server_public_key=self.key.public_key,
            relay=relay,
        )
        return Service(
            listener=LISTENER, descriptor=_SERVICE, servicer=servicer, raw_requests=("ConnectEdge",)
        )

    @property
    def authenticators(self) -> Mapping[str, Mapping[Authentication, Authenticator]]:
        def operator(connection: Connection) -> Principal:
            principal = self._door.of_header(connection.authorization)
            given = (connection.metadata(name) for name in access.TENANT_HEADERS)
            return acting(principal, next((text.strip() for text in given if isinstance(text, str)), None))

        return {LISTENER: {Authentication.TOKEN: operator}}

    async def sweep(self) -> int:
        """Forget what nobody can use any more; how much that was."""
        swept = [
            await self.nodes.sweep(),
            await self.enrollments.sweep(),
            await self.worker_admission.sweep(),
        ]
        if self.workers.routes is not None:
            swept.append(await self.workers.routes.sweep())
        return sum(swept)
